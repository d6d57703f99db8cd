"""Make the pictures of the explorer in docs/ anew, from the page itself.

python tools/screenshots.py [--out docs] [--data-folder FOLDER]

They show networks and images of the package, so anyone can make them; the browser is what `tools/browser.py` finds.
"""

import argparse
from pathlib import Path

from browser import chromium, missing, serving, settle, visit

from vbcaps.explore.networks import Networks

DOCS = Path(__file__).parents[1] / "docs"
# File, link, size of the page, what must be drawn.
PICTURES = (
    ("explore.png", "#model=fashion_laptop&sample=183&rotate=-14&theme=light", (1280, 720), ("shown", "routed")),
    (
        "explore-layer.png",
        "#model=fashion_evidence&sample=183&layer=conv_caps2&theme=dark&heat=1",
        (1280, 720),
        ("shown", "routed"),
    ),
    (
        "explore-pose.png",
        "#model=fashion_laptop&sample=183&view=pose&sweep=rotate&theme=light",
        (1280, 900),
        ("shown", "routed", "swept", "decoded"),
    ),
)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures")
    parser.add_argument("--data-folder", help="where datasets lie")
    arguments = parser.parse_args(words)
    if reason := missing():
        raise SystemExit(f"screenshots: {reason}")
    for name, link, (width, height), names in PICTURES:
        with serving(Networks(data_folder=arguments.data_folder)) as address, chromium(width, height) as driver:
            visit(driver, address, link, *names)
            settle(driver, *names)  # a layer without a position chooses its most active parent, which is drawn anew
            driver.save_screenshot(str(arguments.out / name))
            print(f"drew {arguments.out / name}")


if __name__ == "__main__":
    main()
