import shutil
import subprocess
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

import lightningrl.ui

HERE = Path(__file__).parent
PAGE = Path(lightningrl.ui.__file__).parent / "page"


def test_the_functions_of_the_page_do_what_their_comments_say(tmp_path: Path) -> None:
    node, _ = compute_driver_executable()
    shutil.copytree(PAGE, tmp_path / "page")
    shutil.copy(HERE / "page_functions.mjs", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(
        [node, "--test", "page_functions.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
