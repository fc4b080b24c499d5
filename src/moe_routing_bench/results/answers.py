"""The SQL behind `mrb results`: the fastest implementation of each case, its lead, and how certain that is.

All implementations of a cell were timed in the same rounds. Each has a ratio to the baseline of the cell with
a 99 % interval. The lead is the ratio of the second divided by the ratio of the winner. If one of the two is
the baseline, the lead has the recorded interval. Otherwise the interval is made from both intervals, which is
wider than an interval from the paired samples.
"""

from __future__ import annotations

from moe_routing_bench.bench.verdict import DELTA
from moe_routing_bench.results.same_case import in_sql
from moe_routing_bench.results.winners import CERTAIN

SAME = f"router, layer, {in_sql()}"
SURE = "\n    ".join(f"WHEN '{verdict}' THEN '{said}'" for verdict, said in CERTAIN.items())
# It reads the newest run of every case under the same conditions. An implementation that drops pairs does
# less work, so it cannot win where another one drops none.
BEST = f"""
WITH passed AS (
  SELECT *, max(created_at) OVER (PARTITION BY {SAME}, session, cell_key) AS run_at
  FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate') AND {{condition}}
), newest AS (
  SELECT *, coalesce(dropped_pairs, 0) > 0 AS drops FROM passed
  QUALIFY dense_rank() OVER (PARTITION BY {SAME} ORDER BY run_at DESC, session DESC, cell_key) = 1
), whole AS (
  SELECT * FROM newest QUALIFY NOT drops OR bool_and(drops) OVER (PARTITION BY {SAME})
), ranked AS (
  SELECT *, count(*) OVER (PARTITION BY {SAME}) AS implementations, row_number() OVER fastest AS place,
    lead(impl) OVER fastest AS next, lead(layout) OVER fastest AS next_layout,
    lead(role) OVER fastest AS next_role, lead(verdict) OVER fastest AS next_verdict,
    lead(coalesce(ratio, 1)) OVER fastest / coalesce(ratio, 1) AS lead,
    lead(coalesce(ratio_low, 1)) OVER fastest / coalesce(ratio_high, 1) AS lead_low,
    lead(coalesce(ratio_high, 1)) OVER fastest / coalesce(ratio_low, 1) AS lead_high
  FROM whole
  WINDOW fastest AS (PARTITION BY {SAME} ORDER BY coalesce(ratio, 1), impl, layout)
)
SELECT {SAME}, impl AS best, layout,
  median_ms, error, tokens_per_second, coalesce(ratio, 1) AS ratio, coalesce(baseline, 'itself') AS baseline,
  coalesce(verdict, '') AS verdict, implementations, next, next_layout, lead, lead_low, lead_high,
  stage_seconds,
  CASE CASE
      WHEN next IS NULL THEN ''
      WHEN role = 'baseline' THEN next_verdict
      WHEN next_role = 'baseline' THEN if(verdict = 'FASTER', 'SLOWER', verdict)
      WHEN lead_low > {1 + DELTA} THEN 'SLOWER'
      ELSE 'UNDECIDED' END
    {SURE}
    ELSE '' END AS certain
FROM ranked WHERE place = 1
ORDER BY span, direction, split_part("case", '/', 1), E, D, F, K, T, "case", dtype, store, workload, threads
"""
