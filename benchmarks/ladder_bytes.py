"""Bytes of a step and rank on the ladder from rung 7 on: measured on the debug model, counted for the large one.

    python benchmarks/ladder_bytes.py [override ...]

The debug model trains on four real ranks; its second step is measured. For `europa_1t` on 384 ranks the same trainer takes a dry
step, on tensors without values (`europa_exp.training.dry_step`). Both pass the same counter, and a dry step of the debug model
has to give what its real ranks measured. Overrides go to both. GB and MB are powers of ten.

Handed: inputs of the collectives, for a gather this rank's shard, for a reduction all gradients. Sent: what leaves the rank with
ring algorithms. Whole: the buffer of all shards, a gather's output and a reduction's input (sent is (n-1)/n of it on n ranks).
The total is of parameters and gradients; tokens stay in the node, between the ranks that share out the experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# A dry step has no kernels of an accelerator.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from compose import composed  # noqa: E402
from ranks import run_ranks  # noqa: E402
from step_bytes import Counts, dry_counts, real_counts  # noqa: E402

from europa_exp.comm.traffic import TOKENS, Collective, Kind, Traffic  # noqa: E402
from europa_exp.config import io  # noqa: E402

LARGE = [
    "model=europa_1t",
    "parallelism=fsdp384_ep4",
    "training.seq_len=65536",
    "training.local_batch_size=1",
]
COLUMNS = ("experts", "dense", "in node", "gradients", "tokens")
NINE = "09_bf16_all_to_all"
FEW, MORE = 2, 4
"""Layers of the large model in dry steps; all others follow from these two."""

Accounting = Callable[[Kind, Traffic], float]


def rungs() -> dict[str, list[str]]:
    """Label -> overrides: rung 7 and those above it. Rungs 2 to 7 don't change what collectives of parameters carry.

    Rung 9 stands there twice: first with the all-to-all for experts alone, as the post's profile has it.
    """
    names = sorted(path.stem for path in (ROOT / "conf/experiment/ladder").glob("*.yaml"))
    below = [name for name in names if int(name[:2]) < 8][-1]
    found = {f"07 (bytes of {below[:2]})": [f"experiment=ladder/{below}"]}
    for name in names:
        if name == NINE:
            found["09, experts alone"] = [
                f"experiment=ladder/{name}",
                "comm.gradient_reduce=expert_bf16_all_to_all",
            ]
        if int(name[:2]) >= 8:
            found[name] = [f"experiment=ladder/{name}"]
    return found


def column(kind: Kind) -> str:
    """Where a row of the count belongs in the table."""
    if kind.role == TOKENS:
        return "tokens"
    if kind.collective is not Collective.all_gather:
        return "gradients"
    if kind.role == "expert":
        return "experts"
    return "in node" if kind.group == "node" else "dense"


def handed(kind: Kind, traffic: Traffic) -> float:
    return traffic.handed_bytes


def sent(kind: Kind, traffic: Traffic) -> float:
    return traffic.sent_bytes(kind)


def whole(kind: Kind, traffic: Traffic) -> float:
    return traffic.handed_bytes * (kind.ranks if kind.collective is Collective.all_gather else 1)


def sums(counts: Counts, accounting: Accounting) -> dict[str, float]:
    """Bytes by column."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for kind, traffic in counts.items():
        found[column(kind)] += accounting(kind, traffic)
    return found


def total(columns: dict[str, float]) -> float:
    return columns["experts"] + columns["dense"] + columns["in node"] + columns["gradients"]


def table(title: str, found: dict[str, Counts], accounting: Accounting, unit: float) -> None:
    print(
        f"{title:28} {'experts':>9} {'dense':>9} {'in node':>9} {'gradients':>10} {'total':>9} {'of rung 7':>9} {'of prev.':>8} {'tokens':>9}"
    )
    totals: list[float] = []
    for rung, counts in found.items():
        columns = sums(counts, accounting)
        totals.append(total(columns))
        experts, dense, in_node, gradients, tokens = (columns[name] / unit for name in COLUMNS)
        print(
            f"{rung:28} {experts:9.3f} {dense:9.3f} {in_node:9.3f} {gradients:10.3f} {totals[-1] / unit:9.3f} "
            f"{totals[-1] / totals[0]:9.3f} {totals[-1] / totals[-2 if len(totals) > 1 else 0]:8.3f} {tokens:9.3f}"
        )


def without_tokens(counts: Counts) -> Counts:
    return {kind: traffic for kind, traffic in counts.items() if kind.role != TOKENS}


def measured(frozen: str) -> Counts:
    """The second step of four real ranks, which all count the same but for their tokens."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(4, real_counts, frozen, folder)
    for steps in ranks[1:]:
        assert without_tokens(steps[1]) == without_tokens(ranks[0][1])
    return ranks[0][1]


def dry(frozen: str) -> Counts:
    return run_ranks(1, dry_counts, frozen, timeout=600)[0]


def grown(few: Counts, more: Counts, layers: int) -> Counts:
    """Counts of a model of `layers` layers from those of models of FEW and of MORE layers."""
    times, left = divmod(layers - FEW, MORE - FEW)
    assert few.keys() == more.keys()
    assert left == 0
    return {
        kind: Traffic(
            few[kind].calls + times * (more[kind].calls - few[kind].calls),
            few[kind].handed_bytes + times * (more[kind].handed_bytes - few[kind].handed_bytes),
        )
        for kind in few
    }


def main() -> None:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    # On the host as in the published run; without that, rung 12 has no gradients to release early.
    shared = ["offload.fsdp_cpu=true", *parser.parse_args().overrides]
    begin = time.perf_counter()

    def frozen(rung: str, *overrides: str) -> str:
        return io.to_yaml(composed(*rungs()[rung], *overrides, *shared))

    small = {}
    for rung in rungs():
        yaml = frozen(rung, "training.steps=2")
        small[rung] = measured(yaml)
        assert without_tokens(small[rung]) == without_tokens(dry(yaml)), rung
    print("Debug model, 4 real ranks. A dry step gives the same, but for the routing of tokens.")
    table("MB sent", small, sent, 1e6)
    table("MB handed", small, handed, 1e6)

    layers = composed(*LARGE).model.n_layers
    last = list(rungs())[-1]
    jobs = [(last, layers), *((rung, size) for rung in rungs() for size in (FEW, MORE))]
    yamls = [frozen(rung, *LARGE, f"model.n_layers={size}") for rung, size in jobs]
    with ThreadPoolExecutor(2) as pool:
        counted = dict(zip(jobs, pool.map(dry, yamls), strict=True))
    large = {rung: grown(counted[rung, FEW], counted[rung, MORE], layers) for rung in rungs()}
    assert large[last] == counted[last, layers]
    print(f"\neuropa_1t on 384 ranks, dry steps of {FEW} and {MORE} layers, from which follow {layers}.")
    print(f"A dry step of all {layers} layers gives the same for the last rung, to the byte.")
    table("GB sent", large, sent, 1e9)
    table("GB handed", large, handed, 1e9)
    table("GB whole", large, whole, 1e9)
    against_the_recipe(
        {rung: grown(counted[rung, FEW], counted[rung, MORE], 0) for rung in rungs()}, large, layers
    )
    print(f"\n{time.perf_counter() - begin:.0f} s")


def against_the_recipe(rest: dict[str, Counts], large: dict[str, Counts], layers: int) -> None:
    """Print whole buffers beside the published and derived figures, which are of the layers alone.

    Args:
        rest: what is left without layers (embedding, LM head, final norm), by rung.
    """
    buffers = {}
    for rung in large:
        everything, outside = sums(large[rung], whole), sums(rest[rung], whole)
        buffers[rung] = {name: (everything[name] - outside[name]) / 1e9 for name in COLUMNS}
        buffers[rung]["gathered"] = sum(buffers[rung][name] for name in ("experts", "dense", "in node"))
    first, second, *_, last = buffers
    third = NINE
    rows = [
        ("gather of a layer's experts, bf16, GB", buffers[first]["experts"] / layers / 2, "6.34"),
        ("  in FP8, as a share of that", buffers[second]["experts"] / buffers[first]["experts"], "0.516"),
        ("gather of a layer's dense weights, GB", buffers[first]["dense"] / layers / 2, "0.23"),
        ("gradients of a layer, fp32, GB", buffers[first]["gradients"] / layers, "13.1"),
        ("  by bf16 all-to-all, as a share of that", buffers[third]["gradients"] / buffers[first]["gradients"], "half"),
        ("rung 7: gathered, all layers, GB", buffers[first]["gathered"], "972"),
        ("rung 7: reduced, all layers, GB", buffers[first]["gradients"], "972"),
        ("last rung: both, all layers, GB", total(buffers[last]), "1,004"),
        ("embedding and LM head on top, rung 7, GB", total(sums(rest[first], whole)) / 1e9, "-"),
        ("embedding and LM head on top, last rung, GB", total(sums(rest[last], whole)) / 1e9, "-"),
    ]  # fmt: skip
    print(f"\n{'whole buffers':45} {'counted':>9} {'recipe':>7}")
    for what, value, derived in rows:
        print(f"{what:45} {value:9.5g} {derived:>7}")


if __name__ == "__main__":
    main()
