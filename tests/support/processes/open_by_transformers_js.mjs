// Opens packages by transformers.js; reads a request as JSON, prints the answers as JSON.
// A request: {"packages": [{"folder", "kind", "texts", "generation"}, ...], "encode": [{"folder", "texts"}]}.
// ONNX Runtime is the one for browsers, in WebAssembly, on one thread; nothing is fetched.
import * as onnxruntime from "onnxruntime-web"
import { readFileSync } from "node:fs"
import { basename, dirname } from "node:path"

onnxruntime.env.wasm.numThreads = 1
onnxruntime.env.logLevel = "error"
globalThis[Symbol.for("onnxruntime")] = onnxruntime
const js = await import("@huggingface/transformers")
js.env.allowRemoteModels = false
js.env.backends.onnx.wasm.wasmPaths = new URL("node_modules/onnxruntime-web/dist/", import.meta.url).href
// with a runtime that is given it knows no devices
const wasm = { device: "auto", session_options: { executionProviders: ["wasm"] } }
const classes = {
  seq2seq: js.AutoModelForSeq2SeqLM,
  causal: js.AutoModelForCausalLM,
  sentence: js.AutoModel,
  classifier: js.AutoModelForSequenceClassification,
}

const opened = (folder) => {
  js.env.localModelPath = dirname(folder)
  return basename(folder)
}

async function answer({ folder, kind, texts, generation }) {
  const name = opened(folder)
  const tokenizer = await js.AutoTokenizer.from_pretrained(name)
  const model = await classes[kind].from_pretrained(name, wasm)
  const read = (rows) => tokenizer(rows, { padding: true, truncation: true })
  if (kind === "seq2seq" || kind === "causal") {
    const found = [] // one at a time: a text that has ended in a batch goes on until all have
    for (const text of texts) {
      const ids = await model.generate({ ...(await read([text])), ...generation })
      found.push(tokenizer.batch_decode(ids, { skip_special_tokens: true })[0])
    }
    return found
  }
  const inputs = await read(texts)
  const outputs = await model(inputs)
  if (kind === "classifier") return outputs.logits.tolist().map((row) => js.softmax(row))
  const pipe = await js.pipeline("feature-extraction", name, wasm)
  const pooled = await pipe(texts, { pooling: "mean", normalize: true })
  return [outputs.sentence_embedding.tolist(), pooled.tolist()]
}

async function encode({ folder, texts }) {
  const tokenizer = await js.AutoTokenizer.from_pretrained(opened(folder))
  return texts.map((text) => tokenizer.encode(text))
}

const request = JSON.parse(readFileSync(0, "utf-8"))
const answers = { packages: [], encode: [] }
for (const one of request.packages ?? []) answers.packages.push(await answer(one))
for (const one of request.encode ?? []) answers.encode.push(await encode(one))
console.log(JSON.stringify(answers))
