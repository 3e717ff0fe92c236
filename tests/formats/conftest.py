from hypothesis import settings

# The first call of a torch function takes far longer than the others.
settings.register_profile("formats", deadline=None)
settings.load_profile("formats")
