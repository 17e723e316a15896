//! Exchanges a trained model and its AdamW with PyTorch: the Rust half of `cargo xtask interop --burn`.
//!
//! - `save DIR` trains four steps and saves model and optimizer to `DIR/rust`, then trains on, and
//!   saves what it computed to `DIR/expected`.
//! - `check DIR` loads what PyTorch saved to `DIR/torch`, trains on, and compares with
//!   `DIR/torch_expected`.
#![allow(clippy::print_stdout, reason = "a program that prints")]

#[path = "train.rs"]
mod train;

use anyhow::{Context, Result, ensure};
use burn_core::Tensor;
use dcp::collectives::Solo;
use dcp::{StateDict, Value};
use dcp_state::TrainingState;
use train::{Learner, elements, step_batch};

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

/// Logits before, and losses of, the steps after the checkpoint.
fn go_on(learner: &mut Learner) -> Result<(Vec<f32>, Vec<f32>)> {
    let logits = elements(learner.model.forward(step_batch(*STEPS[1].start()).0))?;
    let losses = STEPS[1].clone().map(|step| learner.step(step, &Solo::new()));
    Ok((logits, losses.collect::<Result<_>>()?))
}

fn tensor<const D: usize>(tensor: Tensor<D>) -> Result<dcp::Tensor> {
    let shape: Vec<u64> = tensor.dims().iter().map(|size| *size as u64).collect();
    Ok(dcp::Tensor::from_slice(&elements(tensor)?, shape)?)
}

fn save(folder: &str) -> Result<()> {
    let mut learner = Learner::new();
    STEPS[0].clone().try_for_each(|step| learner.step(step, &Solo::new()).map(drop))?;
    let (mut model, mut optimizer) = learner.parts();
    let state = TrainingState::new(&mut model, vec![&mut optimizer])?;
    dcp::save(&state, format!("{folder}/rust")).blocking()?;

    let (logits, losses) = go_on(&mut learner)?;
    let mut expected = StateDict::new();
    let rows = logits.len() as u64 / 5;
    expected.insert("logits", dcp::Tensor::from_slice(&logits, [rows, 5])?);
    let losses: Vec<Value> = losses.into_iter().map(|loss| f64::from(loss).into()).collect();
    expected.insert("losses", Value::List(losses));
    for (name, steps) in ["before", "after"].into_iter().zip(STEPS) {
        let (inputs, targets): (Vec<_>, Vec<_>) = steps.map(step_batch).unzip();
        expected.insert(format!("{name}_inputs"), tensor(Tensor::stack::<3>(inputs, 0))?);
        expected.insert(format!("{name}_targets"), tensor(Tensor::stack::<3>(targets, 0))?);
    }
    dcp::save(&expected, format!("{folder}/expected")).blocking()?;
    Ok(())
}

fn check(folder: &str) -> Result<()> {
    let mut learner = Learner::new();
    let (mut model, mut optimizer) = learner.parts();
    let mut state = TrainingState::new(&mut model, vec![&mut optimizer])?;
    dcp::load(&mut state, format!("{folder}/torch")).blocking()?;
    learner.replace(model, optimizer);
    let (logits, losses) = go_on(&mut learner)?;

    let mut expected = StateDict::new();
    let rows = logits.len() as u64 / 5;
    expected.insert("logits", dcp::Tensor::zeros(dcp::DType::Float32, [rows, 5])?);
    expected.insert("losses", Value::None);
    dcp::load(&mut expected, format!("{folder}/torch_expected")).blocking()?;
    let theirs = expected.get("logits").and_then(Value::as_tensor).context("no logits")?;
    let theirs = theirs.to_vec_of::<f32>()?;
    let most = theirs.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
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
