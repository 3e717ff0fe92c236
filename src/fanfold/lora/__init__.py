"""LoRA adapters: read, bound to the places of a model, held in slots, chosen for each row."""

from fanfold.lora.adapter import read_adapter as read_adapter
from fanfold.lora.bind import bind as bind
from fanfold.lora.pool import AdapterPool as AdapterPool
from fanfold.lora.rows import Rows as Rows
