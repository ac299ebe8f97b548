"""`python -m specdec` where it is installed, and `python .` in a checkout."""

import specdec

specdec.main()
