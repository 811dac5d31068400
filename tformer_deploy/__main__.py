"""python -m tformer_deploy"""

from .cli import main

main()
