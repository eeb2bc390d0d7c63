"""From float32 graphs to float16 and bfloat16 ones, in which what would overflow stays float32."""
