"""The grouped product on Hopper: 4-bit weights, repacked once at load, as the register operand of wgmma."""
