"""A script like Megatron-LM's pretrain_gpt.py: the same functions, with a small GPT."""

import time

_PROGRAM_START_TIME = time.time()

from functools import partial

import torch

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer import TransformerConfig
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    set_startup_timestamps,
)
from megatron.training.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    is_first_or_last_pipeline_stage,
)


def model_provider(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    args = get_args()
    config = config or TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        calculate_per_token_loss=args.calculate_per_token_loss,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data_iterator, vp_stage=None):
    """Generate a batch."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None
    return get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator)).values()


def loss_func(loss_mask, output_tensor, model=None):
    """The sum of the loss over unmasked tokens, their number, and a report of both."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    get_rerun_state_machine().validate_result(
        result=loss,
        rejection_func=torch.isnan,
        tolerance=0.0,
        fatal=True,
        message="found NaN in local forward loss calculation",
    )
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Forward training step."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
    return output_tensor, partial(loss_func, loss_mask, model=model)


class Numbers(torch.utils.data.Dataset):
    """Arithmetic sequences of tokens, with a mask on some of them; a map from index to sample."""

    def __init__(self, num, seed):
        self.num, self.seed, self.args = num, seed, get_args()

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        assert 0 <= index < self.num
        draw = torch.Generator().manual_seed(self.seed + index)
        start, stride = torch.randint(self.args.padded_vocab_size, (2,), generator=draw)
        length = self.args.seq_length
        text = (start + stride * torch.arange(length + 1)) % self.args.padded_vocab_size
        mask = (torch.arange(length) < 4 + index % (length - 4)).float()
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": mask,
            "position_ids": torch.arange(length),
        }


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    if torch.distributed.get_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0:
        print("> building train, validation, and test datasets for GPT ...")  # and their caches
    torch.distributed.barrier()
    return [Numbers(num, 1_000_000 * place) for place, num in enumerate(train_val_test_num_samples)]


if __name__ == "__main__":
    # Timestamp right after entering __main__ block (after all imports/library setup)
    _MAIN_ENTRY_TIME = time.time()

    # Register startup timestamps for timing report in pretrain()
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=_MAIN_ENTRY_TIME)

    # Temporary for transition to core datasets
    train_valid_test_datasets_provider.is_distributed = True

    # Optionally enable inprocess restart on pretrain
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)

    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        store=store,
    )
