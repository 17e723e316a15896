//! Exchanges a trained model and its AdamW with PyTorch: the Rust half of `cargo xtask interop
//! --candle`.
//!
//! - `save DIR` trains four steps and saves model and optimizer to `DIR/rust`, then trains on, and
//!   saves what it computed to `DIR/expected`.
//! - `check DIR` loads what PyTorch saved to `DIR/torch`, trains on, and compares with
//!   `DIR/torch_expected`.
#![allow(clippy::print_stdout, reason = "a program that prints")]

#[path = "train.rs"]
mod train;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_nn::{ParamsAdamW, VarMap};
use dcp::collectives::Solo;
use dcp::{StateDict, Value};
use dcp_candle::{AdamW, VarMapModel, from_candle, to_candle};
use dcp_state::TrainingState;

/// Trained before the checkpoint, and after it.
const STEPS: [std::ops::RangeInclusive<u64>; 2] = [1..=4, 5..=8];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match *args {
        ["save", folder] => save(folder),
        ["check", folder] => check(folder),
        _ => anyhow::bail!("usage: exchange save|check DIR"),
    }
}

struct Training {
    vars: VarMap,
    model: VarMapModel,
    optimizer: AdamW,
    group: Arc<Solo>,
}

/// What a model computes after the checkpoint.
struct Computed {
    logits: Tensor,
    losses: Vec<f32>,
}

impl Training {
    fn new() -> Result<Self> {
        let (vars, group) = (VarMap::new(), Arc::new(Solo::new()));
        let model = train::sharded_model(&vars, &*group)?;
        let options = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
        let optimizer = AdamW::of(&model, options);
        Ok(Self { vars, model, optimizer, group })
    }

    fn state(&mut self) -> Result<TrainingState<'_>> {
        Ok(TrainingState::new(&mut self.model, vec![&mut self.optimizer])?)
    }

    fn steps(&mut self, steps: std::ops::RangeInclusive<u64>) -> Result<Vec<f32>> {
        let mut step =
            |step| train::train_step(step, &self.vars, &mut self.optimizer, &*self.group);
        steps.map(&mut step).collect()
    }

    fn go_on(&mut self) -> Result<Computed> {
        let parameters = train::gather_parameters(&self.vars, &*self.group)?;
        let (input, _) = train::step_batch(*STEPS[1].start())?;
        let logits = train::logits(&parameters, &input)?;
        Ok(Computed { logits, losses: self.steps(STEPS[1].clone())? })
    }
}

fn save(folder: &str) -> Result<()> {
    let mut training = Training::new()?;
    training.steps(STEPS[0].clone())?;
    dcp::save(&training.state()?, format!("{folder}/rust")).blocking()?;

    let Computed { logits, losses } = training.go_on()?;
    let mut expected = StateDict::new();
    expected.insert("logits", from_candle(&logits)?);
    let losses: Vec<Value> = losses.into_iter().map(|loss| f64::from(loss).into()).collect();
    expected.insert("losses", Value::List(losses));
    for (name, steps) in ["before", "after"].into_iter().zip(STEPS) {
        let batches: Vec<_> = steps.map(train::step_batch).collect::<Result<_>>()?;
        let (inputs, targets): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
        expected.insert(format!("{name}_inputs"), from_candle(&Tensor::stack(&inputs, 0)?)?);
        expected.insert(format!("{name}_targets"), from_candle(&Tensor::stack(&targets, 0)?)?);
    }
    dcp::save(&expected, format!("{folder}/expected")).blocking()?;
    Ok(())
}

fn check(folder: &str) -> Result<()> {
    let mut training = Training::new()?;
    dcp::load(&mut training.state()?, format!("{folder}/torch")).blocking()?;
    let Computed { logits, losses } = training.go_on()?;

    let mut expected = StateDict::new();
    let shape: Vec<u64> = logits.dims().iter().map(|size| *size as u64).collect();
    expected.insert("logits", dcp::Tensor::zeros(dcp::DType::Float32, shape)?);
    expected.insert("losses", Value::None);
    dcp::load(&mut expected, format!("{folder}/torch_expected")).blocking()?;
    let theirs = expected.get("logits").and_then(Value::as_tensor).context("no logits")?;
    let difference = (to_candle(theirs, logits.device())? - logits)?;
    let most = difference.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    ensure!(most < 1e-5, "logits differ by {most}");
    let Some(Value::List(theirs)) = expected.get("losses") else { anyhow::bail!("no losses") };
    ensure!(theirs.len() == losses.len(), "{} losses of {}", theirs.len(), losses.len());
    for (step, (ours, theirs)) in STEPS[1].clone().zip(losses.iter().zip(theirs)) {
        let theirs = theirs.as_float().context("a loss that is not a float")?;
        let difference = (f64::from(*ours) - theirs).abs();
        ensure!(difference < 1e-5, "step {step}: loss {ours}, PyTorch's is {theirs}");
    }
    println!("logits of PyTorch within {most:e}, {} losses within 1e-5", losses.len());
    Ok(())
}
