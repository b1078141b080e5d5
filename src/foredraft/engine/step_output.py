"""Output of a step: its tokens go to the transcripts, and from there as deltas to the readers."""

from collections.abc import Mapping, Sequence

from foredraft.engine.target_output import TargetOutput
from foredraft.engine.transcript import Transcript
from foredraft.outputs import Origin
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

Transcripts = Mapping[Request, Transcript]


def append_tokens(
    transcripts: Transcripts, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput, draft_seconds: float
) -> Commit:
    """Push the new tokens to the transcripts, with log-probabilities and statistics.

    The transcripts detect the end of an output. The requests themselves get their tokens later, from
    `Scheduler.commit`.

    Args:
        transcripts: transcript of every request of the batch.
        batch: requests of the step.
        tree: verified tree.
        commit: accepted paths.
        output: output of the target's pass.
        draft_seconds: seconds of drafting for each request.

    Returns:
        The commit without the tokens after an end id, a stop string or the maximum length.
    """
    counts = []  # nodes of each path that stay, those before the root included
    for b, request in enumerate(batch.requests):
        transcript, root = transcripts[request], tree.roots[b]
        path, tokens, num_top = commit.paths[b], commit.tokens[b], request.spec.sampling.logprobs
        if b in output.prompt_logits:
            output.append_prompt_logprobs(transcript, tree, b)
        # tokens[i] follows node path[i]. Tokens 0 to root - 1 follow nodes before the root and were committed
        # earlier, so the new tokens start at tokens[root]. A failed request has no tokens at all.
        count = min(root, len(tokens))
        for token in tokens[count:] if count else tokens:
            count += 1
            if num_top is not None:
                transcript.logprobs.append(output.compute_logprob(tree, b, path[count - 1], token, num_top))
            if transcript.push(token):  # the output ends with this token
                break
        if count > root:
            # All new tokens but the last are accepted draft tokens. The last one comes from the target, with two
            # exceptions: the output ends with a draft token, or the logits after a draft token are invalid, so that
            # no token follows it (top of `rules.py`).
            num_drafted = tree.sizes[b] - root - 1
            is_last_drafted = num_drafted > 0 and _is_draft_token(tree, b, path[count - 1], tokens[count - 1])
            num_accepted = count - root if is_last_drafted else count - root - 1
            is_predicted = b in tree.predicted  # the draft was copied from the request's predicted output
            transcript.stats_recorder.record_step(num_drafted, num_accepted, draft_seconds, is_predicted)
        counts.append(count)
    return commit if counts == commit.counts else commit.truncate(counts)


def emit_deltas(transcripts: Transcripts, batch: Batch, tree: TokenTree, commit: Commit) -> tuple[Request, ...]:
    """Queue the new text of a step as deltas. Returns the requests that have one."""
    progressed = []
    for b, request in enumerate(batch.requests):
        tokens, root = commit.tokens[b], tree.roots[b]
        if b in commit.failed:
            transcripts[request].fail("error", _describe_invalid_logits(request))
        elif len(tokens) > root:  # there is a token after the root
            path, transcript = commit.paths[b], transcripts[request]
            # `RequestOptions.is_traced`: the deltas of the request hold the tree of each step, for display.
            step_trees = [transcript.build_step_tree(tree, b, path, tokens)] if request.spec.options.is_traced else ()
            transcript.emit(classify_origins(tree, b, path, tokens), step_trees)
        else:
            continue
        progressed.append(request)
    return tuple(progressed)


def classify_origins(tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> list[Origin]:
    """Classify each new token by the draft children of the node that it follows.

    accepted: one of the children has this token. corrected: there are children, but none has it. bonus: there are no
    children. plain: the request had no draft in this step. Only the last token can be other than accepted: each token
    before it is that of the next node of the path.
    """
    root = tree.roots[b]
    num_new = len(tokens) - root
    if tree.sizes[b] - root == 1:
        return ["plain"] * num_new
    origins: list[Origin] = ["accepted"] * num_new
    if not _is_draft_token(tree, b, path[-1], tokens[-1]):
        origins[-1] = "corrected" if tree.children[b][path[-1]] else "bonus"
    return origins


def _is_draft_token(tree: TokenTree, b: int, node: int, token: int) -> bool:
    """Return whether the token that follows a scored node is that of one of its draft children."""
    tokens = tree.tokens[b]
    return token in [tokens[child] for child in tree.children[b][node]]


def _describe_invalid_logits(request: Request) -> str:
    """Return the error message of a request in `Commit.failed`."""
    if request.matcher is not None and request.matcher.error is not None:
        return f"the grammar cannot be followed any further: {request.matcher.error}"
    return "the model returned invalid logits (NaN or infinite, or no token is allowed)"
