"""Checkpoint formats: names and bytes in files, packed weights in memory."""

from fanfold.formats.codec import dequantize as dequantize
from fanfold.formats.codec import dequantize_expert as dequantize_expert
from fanfold.formats.codec import pack as pack
from fanfold.formats.codec import quantize as quantize
from fanfold.formats.codec import unpack as unpack
from fanfold.formats.stack import stack as stack
