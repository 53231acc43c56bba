"""Published algorithms by name: the settings that `preset = "dapo"` provides where a recipe gives none."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "grpo": {  # arXiv 2402.03300
        "algorithm": {"advantage": "grpo", "aggregation": "rollout-mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    },
    "rloo": {  # arXiv 2402.14740
        "algorithm": {"advantage": "rloo", "aggregation": "rollout-mean"},
        "loss": {"name": "pg"},
    },
    "dr_grpo": {  # arXiv 2503.20783: neither the group's deviation nor a rollout's length has weight
        "algorithm": {"advantage": "dr_grpo", "aggregation": "token-mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    },
    "reinforce++": {  # arXiv 2501.03262
        "algorithm": {"advantage": "reinforce++", "aggregation": "token-mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    },
    "dapo": {  # arXiv 2503.14476
        "algorithm": {"advantage": "grpo", "aggregation": "token-mean", "dynamic_sampling": 3},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    },
    "gspo": {  # arXiv 2507.18071, section 5.1
        "algorithm": {"advantage": "grpo", "aggregation": "call-mean"},
        "loss": {"name": "ppo_clip", "ratio": "call", "clip_low": 3e-4, "clip_high": 4e-4},
    },
    "cispo": {  # arXiv 2506.13585
        "algorithm": {"advantage": "grpo", "aggregation": "token-mean"},
        "loss": {"name": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    },
    "ppo": {  # arXiv 1707.06347, with generalised advantages over calls
        "algorithm": {"credit": "gae_calls", "advantage": "reinforce++", "aggregation": "token-mean"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    },
}
