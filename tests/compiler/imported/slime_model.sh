MODEL_ARGS=(
   --num-layers 36 --hidden-size 2560 --rotary-base "${ROTARY_BASE:-1000000}"
)
