"""What models and training loops do wrong: DDP, shapes, types, numbers."""

from __future__ import annotations

from allranks.diagnosis.model import never

#: Two types of tensors on one device.
_TYPES = (
    r"Input type \((?:(?:torch\.cuda\.|CUDA)\w+\) and \w+ type \((?:torch\.cuda\.|CUDA)|(?!torch|CUDA)[\w: ]+\) and )"
)

RULES = (
    never(
        "ddp-unused-parameters",
        "some parameters got no gradient, and DDP waited for them",
        r"Expected to have finished reduction in the prior iteration",
        r"parameters that were not used in producing (?:the )?loss|which did not receive grad for rank",
        fix="use all outputs in the loss, or DistributedDataParallel(model, find_unused_parameters=True)",
        source="torch/csrc/distributed/c10d/reducer.cpp",
    ),
    never(
        "ddp-ready-twice",
        "a parameter was used twice in one backward pass",
        r"Expected to mark a variable ready only once|marked as ready twice",
        fix="checkpoint(..., use_reentrant=False), or static_graph=True; one forward for each backward",
        source="torch/csrc/distributed/c10d/reducer.cpp",
    ),
    never(
        "ddp-different-models",
        "the ranks' models differ",
        r"DDP expects same model across all ranks",
        r"appears not to match (?:sizes|strides) of the same param in process",
        r"params? .* (?:has|have) different .*across (?:ranks|processes)|inconsistent \d+ params",
        fix="every rank must build the same model, from the same settings and seed",
        source="torch/csrc/distributed/c10d/reducer.cpp",
    ),
    never(
        "ddp-no-gradients",
        "DDP got a model without parameters to train",
        r"DistributedDataParallel is not needed when a module doesn't have any parameter"
        r"|tensors\.size\(\) > 0 INTERNAL ASSERT",
        fix="leave DDP out for that model, or set requires_grad before it is wrapped",
        source="torch/nn/parallel/distributed.py",
    ),
    never(
        "inplace-modification",
        "a tensor that the backward pass needs was changed in place",
        r"has been modified by an inplace operation|is being modified in-?place",
        r"a (?:leaf Variable|view of a leaf).* in-place operation",
        fix="no += or _() on what is needed again; with DDP broadcast_buffers=False if a buffer is named; "
        "torch.autograd.set_detect_anomaly(True) shows the line",
        source="torch/csrc/autograd/saved_variable.cpp",
    ),
    never(
        "device-mismatch",
        "tensors are on different devices",
        r"(?:to|must) be on the same device|Expected object of (?:device|backend) type",
        r"indices should be either on|Expected a '\w+' (?:device type for )?generator",
        r"Input type \(.*\) and weight type \(.*\) should be the same",
        r"module must have its parameters and buffers on device|parameters? .* on the same device",
        r"No backend type associated with device type c|Tensors must be CUDA and dense",
        r"DistributedDataParallel device_ids and output_device arguments only work",
        r"can't convert \w+:\d+ device type tensor to numpy",
        despite=_TYPES,
        fix="move model and batch to the rank's device: ctx.device, or cuda:LOCAL_RANK",
        source="c10/core/TensorImpl; torch/nn/parallel/distributed.py",
    ),
    never(
        "dtype-mismatch",
        "tensors have different types",
        r"expected (?:m1 and m2|scalar type|mat1 and mat2) .*(?:dtype|but found)",
        r"mat1 and mat2 must have the same dtype|must have the same dtype|expected dtype \S+ for"
        r"|\"\w+\" not implemented for '(?:Half|BFloat16|Long|Int|Bool|Char)'",
        r"[Ff]ound dtype \w+ but expected \w+|FlashAttention only supports? fp16 and bf16",
        _TYPES,
        r"dtypes match, got|be cast to the desired output type|following scalar types: |Expected object of scalar type",
        r"Must flatten tensors with uniform dtype|Cannot flatten integer dtype tensors",
        fix="convert inputs to the weights' type, or run the forward pass under torch.autocast",
        source="aten/src/ATen",
    ),
    never(
        "shape-mismatch",
        "shapes do not fit",
        r"shapes? cannot be multiplied",
        r"[Tt]he size of tensor a \(\d+\) must match the size of tensor b",
        r"Sizes of tensors must match except in dimension|stack expects each tensor to be equal size",
        r"shape '\[.*\]' is invalid for input of size|Given groups=\d+, weight of size",
        r"[Ee]xpected input batch_size \(\d+\) to match target batch_size",
        r"[Ee]xpected \d+D .*input|mismatch, got input \(\d+\)|[Dd]imension out of range",
        r"expanded size of the tensor|could not be broadcast|[Ss]ize mismatch, m1|[Tt]arget size .* input size",
        r"size is not compatible with input tensor|should contain \d+ elements not|must have same number of dimensions",
        r"Unable to create tensor, you should probably activate truncation",
        r"Calculated padded input size|Expected more than 1 value per channel|cannot reshape array",
        fix="print the shapes before that line; the last, smaller batch of an epoch is a usual reason (drop_last)",
        source="aten/src/ATen",
    ),
    never(
        "index-out-of-range",
        "a label or token id is larger than the number of classes or embeddings",
        r"index out of range in self|Target -?\d+ is out of bounds",
        fix="compare the largest id of the data with num_classes or num_embeddings, and ignore_index with the padding",
        source="aten/src/ATen/native/Embedding.cpp and LossNLL.cpp",
    ),
    never(
        "second-backward",
        "the graph was freed by an earlier backward pass",
        r"Trying to backward through the graph a second time",
        fix="one forward for each backward: detach() what is kept from one step to the next, or retain_graph=True",
        source="torch/csrc/autograd/saved_variable.cpp",
    ),
    never(
        "initialized-twice",
        "init_process_group was called twice",
        r"trying to initialize the default process group twice",
        fix="call it once, or only if not torch.distributed.is_initialized(); libraries may have called it already",
        source="torch/distributed/distributed_c10d.py",
    ),
    never(
        "half-precision-weights",
        "gradients are float16, and the scaler cannot unscale them",
        r"Attempting to unscale FP16 gradients",
        fix="keep the weights in float32 (no .half()), and run the forward pass under torch.autocast",
        source="torch/amp/grad_scaler.py",
    ),
    never(
        "not-a-number",
        "the loss or a gradient became NaN or infinite",
        r"(?<!best_)(?<!best )[Ll]oss(?:_scale)?\S* ?(?:is|became|=|:) ?(?:nan|inf|NaN)\b",
        r"returned nan values in its \d+th output|Warning: .*\bloss nan",
        r"(?:FloatingPoint|Runtime|Assertion)Error: .*\b(?:nan|NaN|inf|infs?)\b|ValueError: NaNs? .*\bloss",
        r"ValueError: .*(?:is nan or inf|found invalid values:|contains? (?:NaN|infinity))",
        r"[Nn]on-?finite (?:loss|norm|grad)|total norm .* is non-finite|Minimum loss scale reached"
        r"|[Cc]urrent loss scale already at minimum",
        fix="a lower learning rate, gradient clipping, bf16 in place of fp16; look at the batch before it",
        source="torch.autograd.detect_anomaly",
    ),
    never(
        "deepspeed-configuration",
        "DeepSpeed's configuration is wrong",
        r"DeepSpeedConfigError|Check batch related parameters|existing deepspeed config",
        r"(?:Assertion|Value|NotImplemented)Error: .*"
        r"(?:[Zz]ero[ _-]?(?:stage|[0-3]\b)|DeepSpeed|CPUOffload).* (?:requires?|must|not)\b",
        r"train_batch_size is not equal to micro_batch_per_gpu|deepspeed.*(?:config|zero).*(?:Error|invalid|must)",
        r"Please correct the following DeepSpeed config values|validation errors? for DeepSpeed\w*Config",
        r"(?:Error|Exception): .*ZeRO\S* .*(?:not supported|requires|untested|unsupported|in your ds-config)",
        fix="the message names the setting; train_batch_size = micro_batch × accumulation × world size: leave one out",
        source="deepspeed/runtime/config.py",
    ),
    never(
        "lightning-configuration",
        "Lightning's Trainer is configured for something else[: {why}]",
        r"MisconfigurationException(?:: (?P<why>.{1,120}\b))?",
        r"You set `(?P<name>--\w+|\w+)=.*(?:SLURM|Lightning)|(?:SLURM|nodes|devices).*in (?:the )?`?Trainer",
        r"You requested gpu: ",
        fix="do what its message says; devices is the number of ranks on each node, num_nodes that of the nodes",
        source="lightning/fabric/plugins/environments",
    ),
)
