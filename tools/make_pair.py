"""Make a pair of models: a synthetic one of real size, or the embedded one.

python tools/make_pair.py synthetic 8B 1B --acceptance 0.75 --out pairs/8b-1b
python tools/make_pair.py demo corpus | target | draft | measure | ship --work FOLDER
"""

import logging

import typer
from demo_pair.command import app as demo
from synthetic_pair.command import main as synthetic

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
app.command("synthetic")(synthetic)
app.add_typer(demo, name="demo")

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    app()
