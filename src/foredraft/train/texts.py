"""From a plan's files to the documents of a run: read, or written by the target itself."""

from collections.abc import Callable

from foredraft import LLM
from foredraft.train.data import BUILTIN, Reader
from foredraft.train.documents import Document, hold_out
from foredraft.train.generate import Writer
from foredraft.train.place import Place
from foredraft.train.plan import Plan


def texts(plan: Plan, llm: LLM, place: Place, say: Callable[[str], None]) -> tuple[list[Document], list[Document]]:
    """(to learn from, to measure on). Raises ForedraftError where the files hold neither."""
    data = plan.data
    reader = Reader(llm.tokenizer, llm.target.vocab_size, llm.end_ids)
    is_own = bool(getattr(llm.tokenizer, "chat_template", None)) if data.generate is None else data.generate
    if is_own:
        writer = Writer(llm, plan.out, data.written, data.temperatures, plan.steps.seed, say)
        if place.is_main:
            writer.write(reader.questions(data.files, data.opening))
        place.wait()
        documents = reader.documents([str(writer.file)])
    else:
        documents = reader.documents(data.files)
    if data.held_out:
        return documents, reader.documents(data.held_out, is_held_out=True)
    if BUILTIN in data.files:  # whose held-out files nothing built in was ever trained on
        return documents, reader.documents([BUILTIN], is_held_out=True)
    return hold_out(documents, data.held_out_share)
