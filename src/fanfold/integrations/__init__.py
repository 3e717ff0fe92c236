"""What fanfold plugs into: the only rooms that know other libraries of models."""
