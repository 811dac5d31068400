"""python -m tformer_deploy"""

from .cli import app

app()
