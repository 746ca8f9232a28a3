"""The data model of insitu as frozen values (docs/DESIGN.md, section 2).

Values move along the path Task -> Sandbox -> Agent -> Gateway -> Rollout -> Group -> Trainer and are never
changed after construction. This package does no I/O, has no async code and imports no other module.
"""

from insitu.types.capture import EXCLUSIONS, DriftNote, Ledger, Segment, SegmentKind, Trajectory, Turn
from insitu.types.generation import (
    MIN_TEMPERATURE,
    BoolArray,
    Finish,
    FloatArray,
    Generation,
    IntArray,
    RequestKey,
    SamplingParams,
    VersionRuns,
)
from insitu.types.judgement import (
    Group,
    Outcome,
    Rollout,
    Status,
    Timings,
    Tokens,
    Trust,
    Verdict,
    equal_rewards,
)
from insitu.types.limits import Limits
from insitu.types.messages import Message, ModelRequest, Reply, Role, ToolCall, ToolSpec
from insitu.types.tasks import (
    WORKDIR,
    Case,
    Check,
    Exchange,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Oracle,
    RewardKind,
    Setup,
    Task,
    Tree,
    task_hash,
)

__all__ = [
    "EXCLUSIONS",
    "MIN_TEMPERATURE",
    "WORKDIR",
    "BoolArray",
    "Case",
    "Check",
    "DriftNote",
    "Exchange",
    "FileEntry",
    "Finish",
    "FloatArray",
    "Generation",
    "GradingPlan",
    "Group",
    "HiddenTests",
    "IntArray",
    "Ledger",
    "Limits",
    "Message",
    "ModelRequest",
    "Oracle",
    "Outcome",
    "Reply",
    "RequestKey",
    "RewardKind",
    "Role",
    "Rollout",
    "SamplingParams",
    "Segment",
    "SegmentKind",
    "Setup",
    "Status",
    "Task",
    "Timings",
    "Tokens",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "Tree",
    "Trust",
    "Turn",
    "Verdict",
    "VersionRuns",
    "equal_rewards",
    "task_hash",
]
