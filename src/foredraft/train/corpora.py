"""Documents of a run: read from files, or written by the target."""

from collections.abc import Callable

from foredraft.llm import LLM
from foredraft.train.config import TrainPlan
from foredraft.train.data import BUILTIN, DocumentReader
from foredraft.train.distributed import DistributedContext
from foredraft.train.documents import Document, hold_out
from foredraft.train.generate import AnswerWriter
from foredraft.train.seq2seq_records import Seq2SeqEncoding


def load_documents(
    plan: TrainPlan, llm: LLM, distributed: DistributedContext, log_line: Callable[[str], None]
) -> tuple[list[Document], list[Document]]:
    """Load the documents of a run.

    Args:
        plan: Settings of the run.
        llm: Target, which writes the documents if the plan says so.
        distributed: Processes of the run; only the main process writes them.
        log_line: Receives progress messages.

    Returns:
        Training documents and held-out documents.

    Raises:
        ForedraftError: if a file cannot be used or holds no document.
    """
    data = plan.data
    seq2seq = Seq2SeqEncoding.from_model(llm.target, llm.tokenizer)
    reader = DocumentReader(llm.tokenizer, llm.target.vocab_size, llm.end_ids, seq2seq)
    is_generated = bool(getattr(llm.tokenizer, "chat_template", None)) if data.generate is None else data.generate
    if is_generated:
        is_shared = distributed.sharding is not None and plan.target_url is None
        processes = distributed if is_shared else None
        writer = AnswerWriter(llm, plan.out, data.written, data.temperatures, plan.steps.seed, log_line, processes)
        if distributed.is_main or is_shared:
            writer.write(reader.read_prompts(data.files, data.opening))
        distributed.wait()
        documents = reader.read_documents([str(writer.file)])
    else:
        documents = reader.read_documents(data.files)
    if data.held_out:
        return documents, reader.read_documents(data.held_out, is_held_out=True)
    if BUILTIN in data.files:  # no built-in model was trained on the held-out files
        return documents, reader.read_documents([BUILTIN], is_held_out=True)
    return hold_out(documents, data.held_out_share)
