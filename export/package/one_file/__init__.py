"""The form `one-file`: a model as one ONNX file, the loop over tokens, weights and tokenizer inside."""
