"""What did a step of a run teach, beyond what its records tell?"""

from pathlib import Path

from lightningrl.data.taught import Taught, load_taught, taught_file


def taught_of(folder: Path, step: int, policy: str) -> Taught | None:
    """What a step, counted from 0, taught a policy of the run in `folder`; None if nothing was recorded, as by older
    versions, or if the step is not complete. Raises `UserError` if the file is damaged.
    """
    return load_taught(taught_file(folder, step=step, policy=policy))


__all__ = ["Taught", "taught_of"]
