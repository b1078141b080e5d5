"""Functions that tests run in another process. The module is light, since a spawned process imports everything anew."""

from multiprocessing.connection import Connection

from foredraft import LLM, ForedraftError, Sampling


def answer(llm: LLM | None, pipe: Connection) -> None:
    """Send the results of the parent's LLM, if it is given, and of a new one."""
    for given in (llm, None) if llm is not None else (None,):
        try:
            made = given or LLM(drafter=None)
            pipe.send(made.generate("def f(", Sampling(max_tokens=5, temperature=0, ignore_eos=True))[0].text)
        except ForedraftError as error:
            pipe.send(str(error))
