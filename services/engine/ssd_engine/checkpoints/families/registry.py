"""Every family that is served, by the name of its architecture in config.json."""

from ssd_engine.checkpoints.families.llama import LLAMA
from ssd_engine.checkpoints.families.mistral import MISTRAL
from ssd_engine.checkpoints.families.olmo2 import OLMO2
from ssd_engine.checkpoints.families.qwen2 import QWEN2
from ssd_engine.checkpoints.families.qwen3 import QWEN3

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        OLMO2,
        QWEN2,
        QWEN3,
    )
}
