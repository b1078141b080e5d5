"""Text that the target writes itself: a drafter has to foresee the target, not the author of a corpus."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft import LLM, Sampling
from foredraft.checkpoints.disk import convert_write_errors
from foredraft.errors import ForedraftError
from foredraft.train.publish import DISK_FULL_HINT

ROUND = 64  # prompts answered together, and lost together when a run is stopped
ANSWERS_FILE, HEADER_FILE = "generated.jsonl", "generated.json"


@dataclass(frozen=True)
class AnswerWriter:
    """Answers prompts into a JSON Lines file, which a run that is taken up again continues."""

    llm: LLM
    folder: Path
    max_tokens: int  # tokens of an answer, at most
    temperatures: tuple[float, ...]  # in turn
    seed: int
    log_line: Callable[[str], None] = lambda line: None

    @property
    def file(self) -> Path:
        return self.folder / ANSWERS_FILE

    def write(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises ForedraftError if the file holds the answers to other prompts."""
        longest = self.llm.target.context_length - self.max_tokens
        if longest < 1:
            raise ForedraftError(f"--written {self.max_tokens} leaves no room for a prompt in the model's context")
        fitting = [list(prompt) for prompt in prompts if len(prompt) <= longest]
        if not fitting:
            raise ForedraftError(f"no prompt is shorter than the {longest} tokens that --written leaves; lower it")
        if len(fitting) < len(prompts):
            self.log_line(
                f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are longer than {longest}: left out"
            )
        self._prepare_folder(fitting)
        done = self._count_answers()
        if done < len(fitting):
            self.log_line(f"{self.llm.target.name} answers {len(fitting) - done} prompts into {self.file}")
        tenth = -1
        for start in range(done, len(fitting), ROUND):
            lines = list(self._generate_answers(fitting, range(start, min(start + ROUND, len(fitting)))))
            with convert_write_errors(self.folder, DISK_FULL_HINT), self.file.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
            now = 10 * (start + len(lines)) // len(fitting)
            if now != tenth:
                self.log_line(f"{start + len(lines)} of {len(fitting)} prompts answered")
            tenth = now

    def _generate_answers(self, prompts: Sequence[list[int]], indices: range) -> Iterator[str]:
        samplings = [
            Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperatures[i % len(self.temperatures)],
                seed=self.seed + i,
            )
            for i in indices
        ]
        asked = [prompts[i] for i in indices]
        for prompt, answer in zip(asked, self.llm.generate(asked, samplings), strict=True):
            yield json.dumps({"ids": [*prompt, *answer.token_ids], "prompt_tokens": len(prompt), "text": answer.text})

    def _prepare_folder(self, prompts: Sequence[list[int]]) -> None:
        """Say for what the answers are, or check it."""
        own = {
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
            "parameters": self.llm.target.num_parameters,
            "written": self.max_tokens,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
        }
        header = self.folder / HEADER_FILE
        if self.file.exists() and (not header.exists() or _read_json(header) != own):
            raise ForedraftError(f"{self.file} holds answers to other prompts or by other rules; delete it or move it")
        self.folder.mkdir(parents=True, exist_ok=True)
        header.write_text(json.dumps(own) + "\n")

    def _count_answers(self) -> int:
        """Answers there are; the end of one that was cut off is taken away."""
        if not self.file.exists():
            return 0
        text = self.file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.file.write_text(whole, encoding="utf-8")
        return whole.count("\n")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError:
        return None
