#!/bin/bash
# Print every figure of README and docs that rests on the built-in models, one file per command.
#
#     dev/figures.sh OUT [NAME ...]
#
# Tables that a command prints on stderr are in OUT/NAME.err. A command whose file OUT/NAME.txt is complete is not run
# again, so an interrupted run is resumed. It takes hours, and no other program may run beside it. LLAMA and VLLM are the
# environments of llama.cpp and vLLM (docs/how-to/measure-speed.md); tables with other programs are left out without them.
# The names *grown* need `grown_model`.
set -u
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
wanted=" $* "
others=()
[ -n "${LLAMA:-}" ] && others+=(--llama-cpp "$LLAMA")
[ -n "${VLLM:-}" ] && others+=(--vllm "$VLLM")

figure() { # NAME COMMAND...
    local name=$1
    shift
    [ "$wanted" = "  " ] || [[ "$wanted" == *" $name "* ]] || return 0
    [ -e "$out/$name.txt" ] && return 0
    echo "$(date +%T) $name: $*"
    if "$@" > "$out/$name.partial" 2> "$out/$name.err"; then mv "$out/$name.partial" "$out/$name.txt"; else
        echo "  failed; see $out/$name.err"
    fi
}

# README and docs/index.md
figure first foredraft generate "def read_lines(path):" --temperature 0.6 --top-p 0.9 --seed 7 --spec-tokens 2 --max-tokens 66
figure compare foredraft generate "def read_lines(path):" --temperature 0.6 --top-p 0.9 --seed 7 --max-tokens 66 \
    --compare --spec-method draft_model,ngram_lm,ngram,eagle3

# docs/performance.md
figure grown_model foredraft bench grow --params 430M --out "$out/grown430"
[ "${#others[@]}" -gt 0 ] && figure grown foredraft bench compare --model "$out/grown430" --prompts 8 --max-tokens 128 \
    --threads 2 --methods draft_model:3,ngram:8,ngram_lm:8 --spec-tokens 3 --lookup-tokens 8 "${others[@]}" \
    --quantization int8,int4 --verify-cost 1,2,4,5,8,16 --plot docs/compare-430m.png
[ "${#others[@]}" -gt 0 ] && figure streams_grown foredraft bench compare --model "$out/grown430" --prompts 0 \
    --methods ngram --streams 8,16,32,64 --max-tokens 32 --threads 2 --transformers none "${others[@]}"
figure long_model python -m benchmarks.kv_dtype --write-model "$out/long"
llama=()
[ -n "${LLAMA:-}" ] && llama+=(--llama-cpp "$LLAMA")
for context in 4000 16000 32000; do # llama.cpp reads 16,000 tokens in six minutes
    figure "context_$context" foredraft bench compare --model "$out/long" --prompts 0 --methods ngram \
        --verify-cost 1,8,64 --context $context --threads 2 --transformers none "${llama[@]}"
    figure "context_${context}_int8" foredraft bench compare --model "$out/long" --prompts 0 --methods ngram \
        --verify-cost 1,8,64 --context $context --threads 2 --transformers none --kv-dtype int8
done
figure latency foredraft bench latency --prompts 50 --methods draft_model:2,ngram:8,ngram_lm:8 \
    --verify-cost 1,2,4,5,8,16
figure latency_sampled foredraft bench latency --prompts 20 --methods draft_model:2,ngram:8,ngram_lm:8 \
    --temperature 0.8 --top-p 0.95 --seed 7
[ -n "${LLAMA:-}" ] && figure small foredraft bench compare --prompts 10 --threads 2 \
    --methods draft_model:2,ngram:8,ngram_lm:8 --spec-tokens 2 --llama-cpp "$LLAMA" --verify-cost 1,2,4,5,8,16
figure methods python benchmarks/methods.py --prompts 12 --verify reject
figure ensembles python benchmarks/methods.py --prompts 12 --verify reject \
    --methods suffix,ngram,draft_model,eagle3,suffix+draft_model,suffix+eagle3,ngram+draft_model,auto
figure ensembles_grown python benchmarks/methods.py --model "$out/grown430" \
    --spec-model src/foredraft/zoo/draft --prompts 4 --verify reject --workloads code,prose \
    --methods suffix,draft_model,suffix+draft_model
train=(foredraft train --data builtin --steps 1000 --precision bf16 --optimizer muon --lr 2e-3 --cache "$out/traces")
figure train_mtp "${train[@]}" mtp --out "$out/heads/mtp" --set loss=kl
figure train_lstm "${train[@]}" mlp_speculator --out "$out/heads/lstm" --set cell=lstm
figure train_pard "${train[@]}" draft_model --out "$out/heads/pard" --set parallel=true
figure train_p_eagle "${train[@]}" eagle3 --out "$out/heads/p_eagle" --set parallel=true
figure new_drafters python benchmarks/new_drafters.py --heads "$out/heads"
figure new_drafters_grown python benchmarks/new_drafters.py --heads "$out/heads" --grown "$out/grown430" --prompts 8 \
    --max-tokens 64
figure rest python benchmarks/rest.py --steps 500 --methods eagle3,hydra,draft_model
figure bookkeeping python benchmarks/bookkeeping.py --rounds 2
figure kv_dtype python -m benchmarks.kv_dtype
figure quantization python benchmarks/quantization.py --windows 48
figure serving_grown python benchmarks/serving.py --grown "$out/grown430" --json "$out/serving" --plot docs/serving.png
figure prefix python benchmarks/prefix.py
figure micro foredraft bench micro
figure sampling python benchmarks/sampling.py --threads 1
figure sampling_threads python benchmarks/sampling.py --threads 2 --reference-rounds 1
for model in qwen3_5 lfm2; do
    figure "recurrent_$model" python -m benchmarks.recurrent --rounds 5 --models $model
done
figure recurrent_granite4_h python -m benchmarks.recurrent --rounds 3 --models granite4_h --share 0.5
figure recycling python benchmarks/methods.py --prompts 12 --verify reject \
    --methods ngram,suffix,lookahead,token_recycling
figure corrections foredraft bench latency --model builtin-seq2seq --questions corrections --prompts 24 --stop-at-eos \
    --rounds 3 --methods aggressive,aggressive:15,aggressive:23,aggressive:31,draft_model,draft_model:2,draft_model:4
figure grown120_model foredraft bench grow --model builtin-seq2seq --params 120M --out "$out/grown120"
figure corrections_grown foredraft bench latency --model "$out/grown120" --questions corrections --prompts 16 \
    --stop-at-eos \
    --methods aggressive,aggressive:15,aggressive:31,draft_model,draft_model:2,draft_model:4,draft_model:6
for temperature in 0 1; do
    figure "heads_seq2seq_t$temperature" foredraft bench latency --model builtin-seq2seq --questions corrections \
        --prompts 16 --rounds 3 --stop-at-eos --temperature $temperature --methods \
        aggressive,aggressive:23,draft_model,draft_model:4,blockwise:2,eagle:2,medusa:2,aggressive+blockwise,aggressive+draft_model
    figure "heads_grown120_t$temperature" foredraft bench latency --model "$out/grown120" --questions corrections \
        --prompts 16 --rounds 1 --stop-at-eos --temperature $temperature \
        --methods aggressive,aggressive:23,draft_model,draft_model:4,draft_model:6,aggressive+draft_model
done

# docs/figures
for name in acceptance draft_length trees medusa_heads lookahead early_exit block load serving; do
    figure "reproduce_$name" foredraft reproduce $name --threads 2 --out docs/figures
done

# docs/controller.md
figure pairs python benchmarks/controller_cells.py --pairs --minutes 0.2 --threads 2 --out "$out/pairs"
figure cells python benchmarks/controller_cells.py --minutes 0.4 --threads 2 --streams 1,2,4 --out "$out/cells"
figure cells_grown python benchmarks/controller_cells.py --pairs --minutes 0.4 --threads 2 --streams 1,4,16 \
    --model "$out/grown430" --spec-model src/foredraft/zoo/draft --methods draft_model,ngram,suffix --out "$out/cells_grown"
figure controller_sim python benchmarks/controller_sim.py --steps 1500 --loads 1,4
