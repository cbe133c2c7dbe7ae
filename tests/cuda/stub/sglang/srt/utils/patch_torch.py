"""SGLang finds the GPU of a tensor by its UUID, not its number; here both processes see one GPU."""


def monkey_patch_torch_reductions() -> None:
    """Nothing needs to change."""
