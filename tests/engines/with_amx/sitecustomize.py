"""On the path of a server's Python: torch says that the processor has AMX tiles, as an Intel Xeon of today does.

vLLM asks torch alone. A kernel that it would choose then refuses float32, or ends the process here.
"""

from __future__ import annotations

import torch

torch.cpu._is_amx_tile_supported = lambda: True
