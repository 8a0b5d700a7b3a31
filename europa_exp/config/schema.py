"""What can be asked for: one dataclass a group, one documented field a knob.

Two kinds of fields, and no third:

- ``knob(off)``: a mechanism or setting that can be absent. ``off`` is the value that means "as if this field did not
  exist". It is also the default of the schema and it never changes: the identity of a run (see ``identity``) leaves
  out fields that equal it, so adding a knob changes no recorded hash.
- ``required()``: a quantity that every run has (a width, a number of steps). It has no default here; ``conf/`` gives it.

The values that people get by default live in ``conf/*.yaml``, never here. Login-node code reads this module, so it
imports neither torch nor anything heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING: Any = "???"
"""OmegaConf's mark of a value that somebody has yet to give. Not imported: ranks read this module, and need no OmegaConf."""

NEVER_OFF = "<never off>"
"""Marks a field that has no absent state; the identity always includes it."""


def knob(off: Any, *, within: str | None = None) -> Any:
    """A field that can be absent; ``off`` (immutable: None, bool, number, string, enum, or empty tuple/dict) is that state.

    ``within`` is the range of the values, written as an interval: ``[1, 64]``, ``(0, inf)``, ``[0, 1)``.
    """
    metadata = {"off": off, "within": within}
    if isinstance(off, tuple):
        return field(default_factory=lambda: list(off), metadata=metadata | {"off": list(off)})
    if isinstance(off, dict):
        return field(default_factory=lambda: dict(off), metadata=metadata | {"off": dict(off)})
    return field(default=off, metadata=metadata)


def required(*, within: str | None = None) -> Any:
    """A field that every run has; ``conf/`` must give its value. ``within`` is the range of the values (see ``knob``)."""
    return field(default=MISSING, metadata={"off": NEVER_OFF, "within": within})


# ---------------------------------------------------------------------------------------------------------- model


class ScoreFunction(Enum):
    sigmoid = "sigmoid"
    softmax = "softmax"


class AttentionBackend(Enum):
    varlen = "varlen"
    flex = "flex"


@dataclass
class Model:
    """The decoder: grouped-query attention and a mixture of experts in every layer, rotary embeddings on some layers."""

    flavor: str = required()
    """Name of the configuration, for people; torchtitan's ModelSpec carries it."""

    n_layers: int = required(within="[1, inf)")
    """Number of decoder layers, all of them with experts. Source: 74 in the EUROPA post."""

    dim: int = required(within="[1, inf)")
    """Width of the residual stream. Source: 6144 in the EUROPA post."""

    n_heads: int = required(within="[1, inf)")
    """Query heads per layer. Source for europa_1t: derived from the dense weights of 55 MiB a layer at 1/4."""

    n_kv_heads: int = required(within="[1, inf)")
    """Key/value heads per layer (grouped-query attention); divides n_heads."""

    head_dim: int = required(within="[2, inf)")
    """Width of one head; even, because rotary embeddings turn pairs."""

    vocab_size: int = required(within="[2, inf)")
    """Rows of the embedding and of the untied LM head."""

    n_experts: int = required(within="[1, inf)")
    """Routed experts per layer. Source: 384 in the EUROPA post."""

    top_k: int = required(within="[1, inf)")
    """Experts per token. Source: 8 in the EUROPA post."""

    expert_hidden_dim: int = required(within="[1, inf)")
    """Hidden width of one expert (SwiGLU: three matrices of dim x hidden). Source for europa_1t: derived, 1792."""

    rope_every: int = required(within="[1, inf)")
    """Every n-th layer turns queries and keys (layers n-1, 2n-1, ...); the others have no positions. 2 gives 37 of 74."""

    rope_theta: float = required(within="(0, inf)")
    """Base of the rotary frequencies."""

    n_long_rope_layers: int = knob(0, within="[0, inf)")
    """How many of the RoPE layers, evenly spread, hold a cache of long_rope_factor x the sequence length."""

    long_rope_factor: int = knob(1, within="[1, inf)")
    """Length of the long caches in units of the sequence length. Source for europa_1t: 2, from 2.75 GiB of copies."""

    score_function: ScoreFunction = required()
    """How router logits become scores."""

    normalize_top_k: bool = knob(False)
    """Divide the chosen scores by their sum, so that a token's expert weights add up to 1."""

    load_balance_coeff: float = knob(0.0, within="[0, inf)")
    """Step of the auxiliary-loss-free bias that evens out expert load (torchtitan's MoE); 0 is no bias."""

    norm_eps: float = required(within="(0, inf)")
    """Epsilon of the RMS norms."""

    init_std: float = required(within="(0, inf)")
    """Standard deviation of the truncated-normal initialisation; residual outputs are scaled by 1/sqrt(2 n_layers)."""

    attention_backend: AttentionBackend = required()
    """Document-masked attention on an accelerator; on CPU a document-masked SDPA takes its place."""


# ---------------------------------------------------------------------------------------------------- parallelism


class ReshardAfterForward(Enum):
    default = "default"
    always = "always"
    never = "never"


@dataclass
class Parallelism:
    """The layout of ranks. nodes x gpus_per_node ranks = data_parallel_replicate_degree x data_parallel_shard_degree."""

    nodes: int = required(within="[1, inf)")
    """Number of nodes; on one machine they are logical."""

    gpus_per_node: int = required(within="[1, inf)")
    """Ranks per node, one accelerator each. Source: 4 on Jupiter."""

    data_parallel_replicate_degree: int = knob(1, within="[1, inf)")
    """Replicas of the sharded model (HSDP); 1 is plain FSDP. Source: up to 4 in the EUROPA post."""

    data_parallel_shard_degree: int = required(within="[1, inf)")
    """Ranks that the dense parameters are sharded over (FSDP). Source: 384 in the EUROPA post."""

    expert_parallel_degree: int = knob(1, within="[1, inf)")
    """Ranks that the experts are split over; borrowed from the shard ranks. Source: 4, inside a node, in the EUROPA post."""

    reshard_after_forward: ReshardAfterForward = knob(ReshardAfterForward.default)
    """Free gathered parameters after the forward pass (torchtitan's parallelism.fsdp_reshard_after_forward)."""


# ----------------------------------------------------------------------------------------------------------- comm


class ExpertAllGather(Enum):
    bf16 = "bf16"
    fp8 = "fp8"


class GradientReduce(Enum):
    reduce_scatter = "reduce_scatter"
    bf16_all_to_all = "bf16_all_to_all"
    expert_bf16_all_to_all = "expert_bf16_all_to_all"

    @property
    def by_all_to_all(self) -> bool:
        return self is not GradientReduce.reduce_scatter


@dataclass
class Comm:
    """What the collectives carry, when they run, and how long their buffers live."""

    expert_all_gather: ExpertAllGather = knob(ExpertAllGather.bf16)
    """Precision of the expert weights on the wire: bf16 as FSDP does, or FP8 E4M3 in blocks of 128 with one fp32 scale each
    (1.03125 bytes a value). Source: +18% in the EUROPA post."""

    gradient_reduce: GradientReduce = knob(GradientReduce.reduce_scatter)
    """How gradients are summed over the shard ranks: reduce_scatter in fp32 as FSDP does, or bf16_all_to_all: every rank
    sends each owner its slice in bf16 and the owner sums in fp32 (half the bytes, half the gradient buffer, and a receive buffer
    as large as it). expert_bf16_all_to_all leaves dense gradients on the reduce-scatter, as the profile in the EUROPA post
    shows them. Source: +14% in that post."""

    node_local_reshard: bool = knob(False)
    """After forward, keep the dense weights of the layers sharded over the GPUs of a node instead of all ranks, so that
    backward gathers them inside the node. Source: +2% for 4 GiB in the EUROPA post."""

    embedding_gather_in_backward: bool = knob(True)
    """Gather the embedding table again before its gradient, as FSDP does; the gradient needs token numbers only. Source: false
    took away up to 126 ms a step in the EUROPA post."""

    gradient_release_lag: int | None = knob(None, within="[1, inf)")
    """With optimizer.grad_norm=in_backward: layers after which a reduced gradient that the norm has read and FSDP has
    copied to the host may be freed on the device; null keeps all of them until backward ends. Without offload.fsdp_cpu there
    is no such copy to free. Source: 2 layers in the EUROPA post, where keeping all held 9 GiB."""


# ----------------------------------------------------------------------------------------------------------- nccl


@dataclass
class Nccl:
    """NCCL settings; each becomes an environment variable of the ranks. Unset fields leave NCCL's own choice."""

    max_ctas: int | None = knob(None, within="[1, 64]")
    """NCCL_MAX_CTAS: most thread blocks (one SM each) a collective may use, 1 to 64. Source: 16 gave +7% in the EUROPA post."""

    min_ctas: int | None = knob(None, within="[1, 64]")
    """NCCL_MIN_CTAS: fewest thread blocks of a collective, 1 to 64."""

    socket_ifname: str | None = knob(None)
    """NCCL_SOCKET_IFNAME: network interface of the bootstrap, for example ib0."""

    ib_hca: str | None = knob(None)
    """NCCL_IB_HCA: InfiniBand adapters, for example mlx5_0,mlx5_1."""

    ib_timeout: int | None = knob(None, within="[1, 31]")
    """NCCL_IB_TIMEOUT: exponent of the InfiniBand timeout (4.096 us x 2^n), 1 to 31."""

    ib_retry_cnt: int | None = knob(None, within="[1, 255]")
    """NCCL_IB_RETRY_CNT: InfiniBand retries, 1 to 7 in hardware; larger values are taken as given."""

    socket_family: str | None = knob(None)
    """NCCL_SOCKET_FAMILY: AF_INET or AF_INET6."""

    debug: str | None = knob(None)
    """NCCL_DEBUG: VERSION, WARN, INFO or TRACE."""

    extra: dict[str, str] = knob({})
    """Any other NCCL variable by its full name, for example +nccl.extra.NCCL_ALGO=Ring. Only NCCL_* names, no plugins or file paths."""

    record: bool = knob(False)
    """Have NCCL say what it took (NCCL_DEBUG=INFO into a file of each rank), and record that beside what was asked for."""


# ------------------------------------------------------------------------------------------------------ allocator


@dataclass
class Allocator:
    """Which stream's memory pool FSDP's buffers come from. Memory freed in the pool of one stream can't serve another one."""

    all_gather_on_compute_stream: bool = knob(False)
    """Set up all-gathers on the compute stream and wait for them only when the weights are needed (FSDP's asynchronous
    unshard), so that their buffers come from and return to its pool. Source: with the next field +21% in the EUROPA post."""

    receive_buffer_on_compute_stream: bool = knob(False)
    """Take the receive buffer of an all-to-all of comm.gradient_reduce from the compute stream's pool instead of the
    reduce stream's. Without that all-to-all there is no such buffer."""


# -------------------------------------------------------------------------------------------------------- offload


@dataclass
class Offload:
    """What lives in host memory instead of device memory."""

    fsdp_cpu: bool = knob(False)
    """Keep sharded parameters, gradients and optimizer state on the host (FSDP's CPUOffloadPolicy)."""


# ------------------------------------------------------------------------------------------------------ optimizer


class OptimizerName(Enum):
    adamw = "adamw"


class GradNorm(Enum):
    after_backward = "after_backward"
    in_backward = "in_backward"


class DecayType(Enum):
    linear = "linear"
    sqrt = "sqrt"
    cosine = "cosine"


@dataclass
class Optimizer:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    name: OptimizerName = required()
    """Which optimizer."""

    lr: float = required(within="(0, inf)")
    """Peak learning rate."""

    beta1: float = required(within="[0, 1)")
    """Decay of the first moment."""

    beta2: float = required(within="[0, 1)")
    """Decay of the second moment."""

    eps: float = required(within="[0, inf)")
    """Added to the square root of the second moment."""

    weight_decay: float = knob(0.0, within="[0, inf)")
    """Decoupled weight decay."""

    warmup_steps: int = knob(0, within="[0, inf)")
    """Steps of linear warm-up of the learning rate."""

    decay_ratio: float = knob(0.0, within="[0, 1]")
    """Share of the steps, at the end, in which the learning rate decays; 0 holds it constant."""

    decay_type: DecayType = knob(DecayType.linear)
    """Shape of the decay."""

    min_lr_factor: float = knob(0.0, within="[0, 1]")
    """Learning rate at the end of the decay as a share of the peak."""

    max_grad_norm: float = required(within="(0, inf)")
    """Gradients are scaled down to this global norm."""

    grad_norm: GradNorm = knob(GradNorm.after_backward)
    """When the global norm is computed: after_backward over all gradients, wherever they lie by then, or in_backward: each
    gradient's share as its reduction completes, and one all-reduce at the end. Source: 0.6 s a step in the EUROPA post."""


# ----------------------------------------------------------------------------------------------------------- data


class DataSource(Enum):
    sample = "sample"
    synthetic = "synthetic"


@dataclass
class Data:
    """Where tokens come from. Documents are packed into rows; positions restart at each document."""

    source: DataSource = required()
    """sample: text, byte-level tokens. synthetic: random tokens in documents of random length."""

    path: str | None = knob(None)
    """sample only: folder of text files, one document a file; without it Python's own help texts."""

    shuffle_seed: int = required(within="[0, inf)")
    """Seed of the document order (sample) or of the tokens (synthetic)."""

    mean_document_length: int | None = knob(None, within="[1, inf)")
    """synthetic only: mean length of a document in tokens (geometric); without it a document fills its row."""


# ------------------------------------------------------------------------------------------------------- training


class Precision(Enum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class ActivationCheckpoint(Enum):
    none = "none"
    selective = "selective"
    full = "full"


@dataclass
class Training:
    """How long, how much at once, in which precision, what is kept."""

    steps: int = required(within="[1, inf)")
    """Optimizer steps."""

    seq_len: int = required(within="[1, inf)")
    """Tokens per row. Source: 65,536 in the EUROPA post."""

    local_batch_size: int = required(within="[1, inf)")
    """Rows per rank and forward pass."""

    global_batch_size: int | None = knob(None, within="[1, inf)")
    """Rows per optimizer step over all ranks; a multiple of local_batch_size x data-parallel ranks accumulates gradients.
    Without it one forward pass per rank makes a step."""

    seed: int = required(within="[0, inf)")
    """Seed of the initialisation; the same seed gives the same full tensors on any layout."""

    param_precision: Precision = required()
    """Precision of gathered parameters and activations; master weights and reductions stay fp32."""

    activation_checkpoint: ActivationCheckpoint = knob(ActivationCheckpoint.none)
    """none; selective (torchtitan's per-operation choice); full (only layer boundaries are kept, 4x in the EUROPA post)."""

    loss_chunks: int = knob(1, within="[1, inf)")
    """Pieces of the sequence that the LM head and the loss take one after another, so that the logits of the whole
    sequence never exist at once (torchtitan's ChunkedLossWrapper); 1 takes the sequence whole."""

    deterministic: bool = knob(False)
    """Deterministic kernels where PyTorch has them; slower on an accelerator. CPU runs repeat bitwise without it."""

    compile: bool = knob(False)
    """torch.compile of the layers; compiling takes longer than a short run on a CPU."""

    log_every: int = required(within="[1, inf)")
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: int = knob(0, within="[0, inf)")
    """Steps between two checkpoints under the run folder (see cluster.checkpoint_dir); 0 keeps none."""

    checkpoint_async: bool = knob(False)
    """Write checkpoints while training goes on (torchtitan's async mode); takes host memory for a copy of what a rank holds.
    The last checkpoint, and the one before a job stops, are written before it ends all the same."""

    checkpoint_keep: int = knob(0, within="[0, inf)")
    """Newest whole checkpoints that are kept, at least 2 (torchtitan takes no fewer); 0 keeps all. While the next is written
    there is one more. What a killed job left half written goes, too."""

    checkpoint_keep_every: int = knob(0, within="[0, inf)")
    """Keep checkpoints whose step is a multiple of this for good, beside the newest; 0 keeps none of them. A multiple of
    checkpoint_every."""

    initial_checkpoint: str | None = knob(None)
    """Folder of a checkpoint to go on from: weights, optimizer, schedule, place in the data, and the step, so training.steps
    counts from there. One that is not in this runs folder loads only with trust=true (it holds pickles)."""

    init_timeout_s: int = required(within="[1, inf)")
    """Seconds a collective may take before the first step is done."""

    train_timeout_s: int = required(within="[1, inf)")
    """Seconds a collective may take afterwards."""


# ------------------------------------------------------------------------------------------------------ profiling


@dataclass
class Profiling:
    """What a run records beyond its metrics."""

    collectives: bool = knob(False)
    """Record a table of the collectives of parameters, gradients and routed tokens for every logged step: kind, process
    group, dtype, calls, bytes and, on an accelerator, time."""


# ------------------------------------------------------------------------------------------------------- tracking


class TrackingMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass
class Tracking:
    """Weights & Biases. The run folder is the record; W&B is a view of it. Never part of a run's identity."""

    mode: TrackingMode = required()
    """offline writes beside the run and can be synced later; online needs a network; disabled writes nothing."""

    project: str = required()
    """W&B project."""

    entity: str | None = knob(None)
    """W&B team or user; without it the login's default."""

    group: str | None = knob(None)
    """W&B group; without it the name of the sweep."""

    job_type: str = required()
    """W&B job type."""

    notes: str | None = knob(None)
    """Free text shown beside the run."""


# -------------------------------------------------------------------------------------------------------- cluster


class Executor(Enum):
    local = "local"
    slurm = "slurm"


class MasterAddr(Enum):
    first_host = "first_host"
    first_host_ipv4 = "first_host_ipv4"
    first_host_i = "first_host_i"
    jupiter_interconnect = "jupiter_interconnect"
    node_addr = "node_addr"


class NumaBinding(Enum):
    none = "none"
    cpu = "cpu"
    cpu_and_memory = "cpu_and_memory"


class MemoryScope(Enum):
    socket = "socket"
    host = "host"


@dataclass
class Cluster:
    """Where ranks run, and everything in which a site differs. What is personal (account, mail, paths) comes from a file of
    your own (``europa doctor`` names it). Fields below ``env`` are for executor=slurm."""

    name: str = required()
    """Name of the site, for people and for comparisons."""

    executor: Executor = required()
    """local: ranks are processes on this machine. slurm: each rank is a task of a Slurm job on parallelism.nodes nodes."""

    threads_per_rank: int = required(within="[1, inf)")
    """OMP_NUM_THREADS of a rank."""

    preload: bool = knob(False)
    """Ranks start from a process that has torch and torchtitan loaded already (CPU only): no import of ~6 s a rank and run."""

    device_memory_gib: float | None = knob(None, within="(0, inf)")
    """Memory of one accelerator in GiB, for the check before submitting; without it that check is left out."""

    host_memory_gib: float | None = knob(None, within="(0, inf)")
    """Host memory for one rank in GiB, for the check before submitting; without it executor=local takes this machine's."""

    checkpoint_dir: str | None = knob(None)
    """Folder in which the checkpoints of each run get a folder of their own, an absolute path that every node sees, on scratch for
    example; the run folder links to it. null keeps them in the run folder. Personal."""

    env: dict[str, str] = knob({})
    """More environment variables of the ranks, set before torch is imported (allocator settings, for example)."""

    account: str | None = knob(None)
    """Slurm's --account: the budget that node-hours are charged to. Personal."""

    needs_account: bool = knob(False)
    """The site refuses jobs without an account, so a lacking one is refused before anything is submitted. Source: JSC's manual."""

    partition: str | None = knob(None)
    """Slurm's --partition; null leaves Slurm's default. Source: booster on Jupiter (JSC's manual)."""

    time_limit: str | None = knob(None)
    """Slurm's --time of one attempt, as text "HH:MM:SS" or "D-HH:MM:SS". Node-hours are counted with it."""

    max_time_limit: str | None = knob(None)
    """Longest time_limit that the partition takes, written like it. Source: 12 h on Jupiter's booster (JSC's manual)."""

    gres: str | None = knob(None)
    """Slurm's --gres per node, for example gpu:4; null asks for none."""

    cpus_per_task: int | None = knob(None, within="[1, inf)")
    """CPU cores per rank: sbatch's --cpus-per-task, and SRUN_CPUS_PER_TASK for srun, which doesn't inherit it. Source: 72 on
    Jupiter, one Grace."""

    srun_args: list[str] = knob(())
    """More arguments of srun, one a list entry, for example --cpu-bind=verbose. Exit codes don't depend on them."""

    sbatch_args: dict[str, str] = knob({})
    """Any other #SBATCH option by its long name without dashes, for example +cluster.sbatch_args.qos=debug. One that takes no value
    is true (+cluster.sbatch_args.hold=true); false leaves it out."""

    modules: list[str] = knob(())
    """Environment modules that the job script loads, in this order. Software, like the version of torch: it is recorded, but
    not part of the identity."""

    setup: list[str] = knob(())
    """Shell lines of the job script before srun, after the modules; on the first node only. Write $NAME, not ${NAME}."""

    comment: str | None = knob(None)
    """Slurm's --comment. On Jupiter it sets power and clocks of the nodes, for example "CPU_POWER_CAP=...;THP=never": part of
    the identity."""

    exclude: str | None = knob(None)
    """Slurm's --exclude: nodes that the job must not get."""

    nodelist: str | None = knob(None)
    """Slurm's --nodelist: nodes that the job must get."""

    switches: str | None = knob(None)
    """Slurm's --switches: most leaf switches, and how long to wait for that, for example 1@02:00:00."""

    mail_user: str | None = knob(None)
    """Slurm's --mail-user. Personal."""

    mail_type: str | None = knob(None)
    """Slurm's --mail-type, for example END,FAIL. Personal."""

    master_addr: MasterAddr = knob(MasterAddr.first_host)
    """How ranks address the node of rank 0: first_host its name as Slurm lists it; first_host_ipv4 the IPv4 address that the
    name resolves to; first_host_i the name and an i (InfiniBand names on JUWELS); jupiter_interconnect
    <name>-interconnect-1.jupiter.internal; node_addr what scontrol calls NodeAddr."""

    network_interface: str | None = knob(None)
    """GLOO_SOCKET_IFNAME: interface of gloo, for example ib0; null leaves gloo's choice. NCCL's is nccl.socket_ifname."""

    numa_binding: NumaBinding = knob(NumaBinding.none)
    """Bind local rank i to NUMA node i with numactl: its cpu, or cpu_and_memory. Source: --membind in the EUROPA post; part of the
    identity, as it changes speed."""

    numa_required: bool = knob(False)
    """Stop a rank that can't be bound (no numactl, no such node, a node without CPUs). Off: it says why and runs unbound."""

    offline: bool = knob(False)
    """Nodes have no internet: HF_HUB_OFFLINE=1, and tracking.mode=online is refused."""

    python: str | None = knob(None)
    """Python interpreter on the nodes, an absolute path, or a command that ends in one (a container's); null is the one that
    submits."""

    unpack: str | None = knob(None)
    """Archive of the software environment (tar, also compressed) that every node unpacks into unpack_to before ranks start:
    hundreds of ranks importing from a parallel file system wait for its metadata. Then python lies in unpack_to."""

    unpack_to: str | None = knob(None)
    """Folder on each node for unpack, an absolute path on a local disk or in memory, for example /dev/shm/europa."""

    requeue: bool = knob(False)
    """Slurm may start the job again under the same number (--requeue): after its time limit, a failed node, preemption. Off:
    --no-requeue, and dependent jobs continue the run."""

    max_attempts: int = knob(1, within="[1, 100]")
    """Most attempts of one run, the first included. One that met the time limit and saved nothing newer than it began from is the
    last: the next one would end like it."""

    signal_margin_s: int = knob(0, within="[0, 65535]")
    """Seconds before the time limit at which ranks are told to save and stop (sbatch --signal=USR2@margin); 0 tells nobody."""

    memory_floor_gib: float | None = knob(None, within="(0, inf)")
    """Least free plus reclaimable host memory in GiB that a rank's socket (or host, see memory_floor_scope) must have at the start; below
    it the job names the nodes, leaves them out and starts again. Source: the EUROPA post saw 72.7 to 119.7 GiB free a socket."""

    memory_floor_scope: MemoryScope = knob(MemoryScope.socket)
    """What memory_floor_gib is compared with: the NUMA node (socket) of each local rank, or the whole host."""

    inside_allocation: bool = knob(False)
    """Run with srun inside the allocation that this shell holds (salloc), instead of asking sbatch for one."""


# --------------------------------------------------------------------------------------------------------- launch


class Preview(Enum):
    """What `launch.preview` shows. False as a condition where nothing is to be shown."""

    false = "false"
    true = "true"
    script = "script"

    def __bool__(self) -> bool:
        return self is not Preview.false


@dataclass
class Launch:
    """How this call behaves. Never part of a run's identity."""

    runs_dir: str = required()
    """Folder of run folders; relative to where the command was typed."""

    preview: Preview = knob(Preview.false)
    """true: print the points (name, hash, what differs, ranks, nodes, node-hours) and submit nothing. script: print the job
    script of each shape of job, as Slurm would get it."""

    repeat: int = knob(1, within="[1, 1000]")
    """Runs of each identity, for error bars."""

    force: bool = knob(False)
    """Run points that have a completed run of the same identity, code, data and cluster already."""

    sweep_name: str | None = knob(None)
    """Name of the sweep that the runs of this call belong to; without it the sweep file's name or what is varied, and a time."""

    detach: bool = knob(False)
    """Return as soon as Slurm has the jobs, and say what to type next; without it the call follows them. executor=slurm only."""

    max_node_hours: float | None = knob(None, within="(0, inf)")
    """Refuse a call whose jobs could use more node-hours than this: nodes x cluster.time_limit x cluster.max_attempts, over all
    points. A budget holds for all attempts, so one that must be small wants cluster.max_attempts=1. Earlier calls don't count."""

    points_per_job: int = knob(1, within="[1, inf)")
    """Points that run in turn inside one Slurm job, on the same nodes: one wait in the queue, and no differences between nodes."""

    throttle: int | None = knob(None, within="[1, inf)")
    """Most jobs of a sweep that run at once (a job is points_per_job points); null is no limit but Slurm's. A sweep of several
    arrays (several shapes, or more jobs than an array may have) runs them in turns where their limits would add up to more:
    nodes then stay idle until the slowest job of a turn has ended."""

    max_array_size: int | None = knob(None, within="[2, inf)")
    """Slurm's MaxArraySize (the largest index is one less); larger sweeps become several arrays. null asks scontrol."""

    dependency: str | None = knob(None)
    """Slurm's --dependency of every job of the call, for example afterok:123456."""

    snapshot: bool = knob(False)
    """Freeze the code beside the configuration; the job imports that, so edits after the submission change nothing."""


# ----------------------------------------------------------------------------------------------------------- root


@dataclass
class Config:
    """One composition: everything a run is told."""

    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    comm: Comm = field(default_factory=Comm)
    nccl: Nccl = field(default_factory=Nccl)
    allocator: Allocator = field(default_factory=Allocator)
    offload: Offload = field(default_factory=Offload)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    profiling: Profiling = field(default_factory=Profiling)
    tracking: Tracking = field(default_factory=Tracking)
    cluster: Cluster = field(default_factory=Cluster)
    launch: Launch = field(default_factory=Launch)

    tags: list[str] = knob(())
    """Words to find the run by, here and in W&B (1 to 64 characters each). Not part of the identity."""

    trust: bool = knob(False)
    """Allow loading checkpoints and dataloader state from outside this runs folder (pickles can run code)."""


IDENTITY_EXCLUDES: frozenset[str] = frozenset(
    {
        "tracking",
        "launch",
        "tags",
        "trust",
        "training.init_timeout_s",
        "training.train_timeout_s",
        "cluster.name",
        "cluster.executor",
        "cluster.preload",
        "cluster.device_memory_gib",
        "cluster.host_memory_gib",
        "cluster.checkpoint_dir",
        "cluster.account",
        "cluster.needs_account",
        "cluster.partition",
        "cluster.time_limit",
        "cluster.max_time_limit",
        "cluster.gres",
        "cluster.cpus_per_task",
        "cluster.srun_args",
        "cluster.sbatch_args",
        "cluster.modules",
        "cluster.setup",
        "cluster.exclude",
        "cluster.nodelist",
        "cluster.switches",
        "cluster.mail_user",
        "cluster.mail_type",
        "cluster.master_addr",
        "cluster.network_interface",
        "cluster.numa_required",
        "cluster.offline",
        "cluster.python",
        "cluster.unpack",
        "cluster.unpack_to",
        "cluster.requeue",
        "cluster.max_attempts",
        "cluster.signal_margin_s",
        "cluster.memory_floor_gib",
        "cluster.memory_floor_scope",
        "cluster.inside_allocation",
    }
)
"""Fields and groups that can't change a result and are no part of a run's identity. Everything else is."""
