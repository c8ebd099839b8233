"""A script for Hugging Face's Trainer, with what it needs to be continued exactly."""

import torch
from model import make_data, make_model
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import allranks


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs, labels):
        outputs = self.layers(inputs)
        return {"loss": functional.mse_loss(outputs, labels), "logits": outputs}


class StopWhenAsked(TrainerCallback):
    """Has the Trainer save its own checkpoint and stop, on all ranks at the same step."""

    def __init__(self, ctx, folder):
        self.checkpoints = ctx.checkpoints(folder, resume=False, save_at_end=False, stop=self)

    def on_step_end(self, args, state, control, **_):
        if self.checkpoints.step():
            control.should_save = control.should_training_stop = True

    def state_dict(self):
        return {}  # The Trainer's checkpoint has all there is to save.

    def load_state_dict(self, state):
        pass


def main():
    args = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        save_steps=50,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    ctx = allranks.init(seed=None)  # uses the Trainer's process group
    args.output_dir = str(ctx.run_dir / "checkpoints")
    set_seed(0)
    training, held_out = ([{"inputs": x, "labels": y} for x, y in data] for data in make_data())
    trainer = Trainer(Regression(), args, train_dataset=training, eval_dataset=held_out)
    trainer.add_callback(StopWhenAsked(ctx, args.output_dir))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    ctx.close()  # exits, to be continued, if the job was asked to stop
    print(f"loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
