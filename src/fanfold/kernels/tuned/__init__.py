"""Tables of configs chosen by measurement, one JSON file a kernel, read by that kernel's folder."""
