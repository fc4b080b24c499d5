from moe_routing_bench.cli import main

main()
