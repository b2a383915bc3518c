"""What is known about a model folder, for the policies and engines that import this package.

question                                                  | file
----------------------------------------------------------+--------------------
architecture and sizes in config.json                     | model_config.py
counts of weights, widths and heads, for estimates        | dimensions.py
tokenizer; tokens that end a response                     | tokenizer.py
names of weights in checkpoints, so those that vLLM loads | tensor_names.py
shapes and values of weights by those names               | weights.py
safetensors files: read, check, write in shards           | safetensors_files.py
LoRA adapters in the files of PEFT                        | peft_files.py
export that transformers, vLLM or PEFT loads              | export.py
"""
