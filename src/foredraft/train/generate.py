"""Answers of the target to prompts, as training data.

A drafter has to predict the target, not the author of a corpus.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors
from foredraft.llm import LLM
from foredraft.sampling.params import Sampling
from foredraft.train.distributed import DistributedContext
from foredraft.train.prompts import TrainPrompt, get_ids, get_source
from foredraft.train.publish import DISK_FULL_HINT
from foredraft.train.seq2seq_records import write_record

ROUND = 64  # prompts answered together; a run that is stopped loses the answers of one round
PROGRESS_MESSAGES = 10  # messages while prompts are answered
ANSWERS_FILE, HEADER_FILE = "generated.jsonl", "generated.json"


@dataclass(frozen=True)
class AnswerWriter:
    """Writer of answers into a JSON Lines file, which a resumed run continues."""

    llm: LLM
    folder: Path
    max_tokens: int  # maximum length of an answer, in tokens
    temperatures: tuple[float, ...]  # temperatures of successive answers, in turn
    seed: int
    log_line: Callable[[str], None] = lambda line: None
    # Processes that share the target's layers: all generate the answers, the main process writes them.
    processes: DistributedContext | None = None

    @property
    def file(self) -> Path:
        return self.folder / ANSWERS_FILE

    def write(self, prompts: Sequence[TrainPrompt]) -> None:
        """Answer the prompts that have no answer in the file yet.

        Args:
            prompts: Every prompt, in token ids. Prompts that leave no room for an answer are skipped.

        Raises:
            ForedraftError: if the file holds answers to other prompts, or no prompt is short enough.
        """
        max_prompt = self.llm.target.context_length - self.max_tokens
        if max_prompt < 1:
            raise ForedraftError(f"--written {self.max_tokens} leaves no room for a prompt in the model's context")
        fitting = [prompt for prompt in prompts if len(get_ids(prompt)) <= max_prompt]
        if not fitting:
            raise ForedraftError(f"no prompt is shorter than the {max_prompt} tokens that --written leaves; lower it")
        if len(fitting) < len(prompts):
            self.log_line(
                f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are longer than {max_prompt}: left out"
            )
        done = self._find_answers(fitting)
        if done < len(fitting):
            self.log_line(f"{self.llm.target.name} answers {len(fitting) - done} prompts into {self.file}")
        previous = -1
        for start in range(done, len(fitting), ROUND):
            lines = list(self._generate_answers(fitting, range(start, min(start + ROUND, len(fitting)))))
            if self._is_main:
                with convert_write_errors(self.folder, DISK_FULL_HINT), self.file.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in lines))
            progress = PROGRESS_MESSAGES * (start + len(lines)) // len(fitting)
            if progress != previous:
                self.log_line(f"{start + len(lines)} of {len(fitting)} prompts answered")
            previous = progress

    def _generate_answers(self, prompts: Sequence[TrainPrompt], indices: range) -> Iterator[str]:
        samplings = [
            Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperatures[i % len(self.temperatures)],
                seed=self.seed + i,
            )
            for i in indices
        ]
        batch = [prompts[i] for i in indices]
        for prompt, answer in zip(batch, self.llm.generate(batch, samplings), strict=True):
            yield json.dumps(write_record(prompt, answer.token_ids) | {"text": answer.text})

    def _find_answers(self, prompts: Sequence[TrainPrompt]) -> int:
        """Return the number of answers in the file, which the main process prepares."""
        count = 0
        if self._is_main:
            self._prepare_folder(prompts)
            count = self._count_answers()
        return count if self.processes is None else self.processes.share_number(count)

    @property
    def _is_main(self) -> bool:
        return self.processes is None or self.processes.is_main

    def _prepare_folder(self, prompts: Sequence[TrainPrompt]) -> None:
        """Write the header of the answers file, or check that it is that of these prompts."""
        settings = {
            "prompts": _digest(prompts),
            "parameters": self.llm.target.num_parameters,
            "written": self.max_tokens,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
        }
        header = self.folder / HEADER_FILE
        if self.file.exists() and (not header.exists() or _read_json(header) != settings):
            raise ForedraftError(
                f"{self.file} holds answers to other prompts or with other settings; delete it or move it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        header.write_text(json.dumps(settings) + "\n")

    def _count_answers(self) -> int:
        """Count the complete answers in the file, and remove an incomplete last line."""
        if not self.file.exists():
            return 0
        text = self.file.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self.file.write_text(complete, encoding="utf-8")
        return complete.count("\n")


def _digest(prompts: Sequence[TrainPrompt]) -> str:
    """Hash prompts, in order."""
    rows: list[Any] = []
    for prompt in prompts:
        source = get_source(prompt)
        rows.append(get_ids(prompt) if source is None else [source.tokens, get_ids(prompt)])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError:
        return None
