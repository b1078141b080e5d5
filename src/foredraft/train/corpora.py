"""From a plan's files to the documents of a run: read, or written by the target itself."""

from collections.abc import Callable

from foredraft import LLM
from foredraft.train.config import TrainPlan
from foredraft.train.data import BUILTIN, DocumentReader
from foredraft.train.distributed import DistributedContext
from foredraft.train.documents import Document, hold_out
from foredraft.train.generate import AnswerWriter


def load_documents(
    plan: TrainPlan, llm: LLM, distributed: DistributedContext, log_line: Callable[[str], None]
) -> tuple[list[Document], list[Document]]:
    """(to learn from, to measure on). Raises ForedraftError where the files hold neither."""
    data = plan.data
    reader = DocumentReader(llm.tokenizer, llm.target.vocab_size, llm.end_ids)
    is_own = bool(getattr(llm.tokenizer, "chat_template", None)) if data.generate is None else data.generate
    if is_own:
        writer = AnswerWriter(llm, plan.out, data.written, data.temperatures, plan.steps.seed, log_line)
        if distributed.is_main:
            writer.write(reader.read_prompts(data.files, data.opening))
        distributed.wait()
        documents = reader.read_documents([str(writer.file)])
    else:
        documents = reader.read_documents(data.files)
    if data.held_out:
        return documents, reader.read_documents(data.held_out, is_held_out=True)
    if BUILTIN in data.files:  # whose held-out files nothing built in was ever trained on
        return documents, reader.read_documents([BUILTIN], is_held_out=True)
    return hold_out(documents, data.held_out_share)
