"""The planner's exchange beside what DeepEP publishes for its low-latency kernels:

    python measurements/parallel/deepep.py > measurements/parallel/deepep.txt     # a minute

Published (docs/legacy.md of github.com/deepseek-ai/DeepEP): H800, one 400 Gbit/s card each, 128 tokens a
rank, 7168 wide, 8 of 256 experts, 8 bit there, 16 bit back. Bytes there: 7168 and a float32 scale for each
128 numbers. The times are not fitted, but they chose between two stated rates: `h800-400g` has the card's
50 GB/s; with 43, the bandwidth that page derives from the 64 ranks' time, the errors are 10.4 % and 18.7 %.
"""

from __future__ import annotations

from statistics import median

from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.planner.fabric import exchange, ports, read_fabric
from moe_routing_bench.planner.flow import count_flow
from moe_routing_bench.workloads.workload import make_workload

PUBLISHED_US = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
T, E, K, THERE, BACK = 128, 256, 8, 7168 + 7168 // 128 * 4, 7168 * 2

fabric = read_fabric("h800-400g")
print(__doc__)
print("ranks   dispatch: published us, predicted, error     combine: published us, predicted, error")
errors = []
for W, published in PUBLISHED_US.items():
    drawn = make_workload("uniform", T=W * T, E=E, K=K, W=W).routing.expert_TK.numpy()
    flow = count_flow(lambda rank, drawn=drawn: drawn[rank * T : (rank + 1) * T], contiguous(E, ranks=W))
    sums = ports(flow.rows_WW, fabric)
    mine = exchange(sums, THERE, fabric).seconds, exchange(sums.turned, BACK, fabric).seconds
    off = [1e6 * seconds / us - 1 for seconds, us in zip(mine, published, strict=True)]
    errors += off
    cells = [
        f"{us:>8} {1e6 * seconds:>10.0f} {100 * error:>8.1f} %"
        for us, seconds, error in zip(published, mine, off, strict=True)
    ]
    print(f"{W:>5}            {cells[0]}                    {cells[1]}")
sizes = sorted(map(abs, errors))
print(f"\nmedian error {100 * median(sizes):.1f} %, worst {100 * sizes[-1]:.1f} %")
