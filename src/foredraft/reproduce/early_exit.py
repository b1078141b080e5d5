"""Self-speculation: the first layers of the target draft for the whole target."""

from collections.abc import Sequence

from foredraft.bench.methods import PLAIN
from foredraft.llm import LLM
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.method_points import (
    MethodPoint,
    build_method_points,
    build_method_table,
    draw_series,
    find_best,
)
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

METHOD: str = "early_exit"
LENGTH = 2  # draft length K
SHARES = (0.17, 0.25, 0.5, 0.67, 0.75, 0.92)  # of the layers that draft
PLAIN_EXIT, ADAPTER = "first layers alone", "with a trained adapter"


def measure(bench: Workbench) -> Measurement:
    """Measure exits after several layers, and one with an adapter if there is one."""
    llm = bench.small_target
    layers = llm.target.num_layers
    exits = sorted({min(max(1, round(share * layers)), layers - 1) for share in SHARES})
    generators: dict[str, LLM] = {PLAIN: llm}
    places: dict[str, tuple[str, float]] = {}
    if llm.is_builtin or bench.options.spec_model is not None:
        adapted = bench.add_drafter(llm, f"{METHOD}:{LENGTH}")
        generators[ADAPTER] = adapted
        exit_layer = find_exit_layer(bench, llm)
        places[ADAPTER] = (ADAPTER, float(exit_layer))
        exits = [layer for layer in exits if layer != exit_layer]  # the adapter belongs to this layer
    for layer in bench.choose(exits, exits[:2]):
        label = f"{METHOD}:{LENGTH}:exit_layer={layer}"
        generators[label] = llm.with_drafter({"method": METHOD, "exit_layer": layer}, LENGTH)
        places[label] = (PLAIN_EXIT, float(layer))
    prompts, tokens = bench.load_prompts(12), bench.choose(64, 12)
    points: list[MethodPoint] = []
    for mode in bench.choose((GREEDY, SAMPLED), (GREEDY,)):
        points += build_method_points(bench.run_rows(generators, mode, prompts, tokens), places, mode)
    return Measurement(
        findings=tuple(_state_best(points, layers)),
        notes=(
            bench.describe_target(llm),
            f"{bench.describe_runs(prompts, tokens)}; K = {LENGTH}",
            f"the target has {layers} layers and was not trained for early exit; the adapter is a small gated layer "
            "before its output matrix",
        ),
        tables=(build_method_table(points, "layers"),),
        panels=draw_series(points, "layers that draft"),
        data={"points": points, "layers": layers},
    )


def find_exit_layer(bench: Workbench, llm: LLM) -> int:
    """Find the layer of the adapter in its folder."""
    from foredraft import zoo
    from foredraft.drafters.checkpoint_folders import read
    from foredraft.drafters.common.target_access import describe_target
    from foredraft.drafters.registry import find_method

    method = find_method(METHOD)
    assert method is not None
    folder = bench.options.spec_model or zoo.find_drafter(method.built_in.folders)
    return int(read(str(folder), describe_target(llm.target), method).shape.exit_layer)


def _state_best(points: Sequence[MethodPoint], layers: int) -> list[str]:
    sentences = []
    for series, mode in dict.fromkeys((p.series, p.mode) for p in points):
        best = find_best(points, series, mode)
        sentences.append(
            f"{series}, {mode}: fastest after {best.x:g} of {layers} layers, {best.speed_up:.2f}x with "
            f"{best.acceptance_length:.2f} tokens a pass"
        )
    return sentences


CLAIM = Claim(
    name="early_exit",
    title="Self-speculation by early exit",
    statement="The first layers of a model can draft for the whole model, if they were trained for it",
    sources=(
        Source(
            "2309.08168",
            "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
            "Layers that are skipped make a draft without a second model, up to 1.99x",
        ),
        Source(
            "2404.16710",
            "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
            "Models trained with layer dropout and an early-exit loss reach 1.82x to 2.16x on three tasks",
        ),
    ),
    minutes=1,
    measure=measure,
)
