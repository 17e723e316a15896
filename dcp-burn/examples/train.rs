//! Trains a small model on several processes, each with its micro-batches, and saves every third step.
//! Started again, on any number of processes, it resumes; the losses are the same bits as those of a
//! run that never stopped.
//!
//! `train FOLDER STEPS`, in each process, with the variables of torchrun (`RANK`, `WORLD_SIZE`,
//! `MASTER_ADDR`, `MASTER_PORT`). Rank 0 prints a line per step.
#![allow(dead_code, clippy::print_stdout, reason = "a program, of which a test has a part")]

use std::sync::Arc;

use anyhow::{Context, Result};
use burn_core as burn;
use burn_core::Tensor;
use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use dcp::collectives::TcpConfig;
use dcp::jobs::run::SaveSchedule;
use dcp::manager::CheckpointManager;
use dcp::{Checkpointer, Collective, Value};
use dcp_burn::{BurnAdam, BurnModel};
use dcp_state::TrainingState;

const INPUTS: usize = 8;
const HIDDEN: usize = 13;
const OUTPUTS: usize = 5;
/// The gradients of a step are the sum of those of its micro-batches, in their order, whoever
/// computes them.
const MICRO_BATCHES: u64 = 6;
const ROWS: usize = 4;
const SAVE_EVERY: u64 = 3;
pub(crate) const LEARNING_RATE: f64 = 0.01;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().context("usage: train FOLDER STEPS")?;
    let steps = args.next().context("usage: train FOLDER STEPS")?.parse()?;
    let group = Arc::new(TcpConfig::from_env()?.connect()?);
    train(group, &folder, steps, |step, loss| println!("{step} {loss}"))
}

#[derive(Module, Debug)]
pub(crate) struct Net {
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    pub(crate) fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        self.fc2.forward(burn::tensor::activation::relu(self.fc1.forward(rows)))
    }
}

/// A model, its optimizer and the rate at which it learns.
pub(crate) struct Learner {
    pub(crate) model: Net,
    optimizer: ModuleOptimizer,
    rate: f64,
}

impl Learner {
    pub(crate) fn new() -> Self {
        let device = device();
        let linear = |inputs, outputs, seed| {
            let mut chance = Chance(seed);
            let weight: Vec<f32> = (0..inputs * outputs).map(|_| chance.next() * 0.5).collect();
            let bias: Vec<f32> = (0..outputs).map(|_| chance.next() * 0.5).collect();
            let mut linear = LinearConfig::new(inputs, outputs).init(&device);
            let weight = TensorData::new(weight, [inputs, outputs]);
            linear.weight = Param::from_data(weight, &device);
            linear.bias = Some(Param::from_data(TensorData::new(bias, [outputs]), &device));
            linear
        };
        let model = Net { fc1: linear(INPUTS, HIDDEN, 1), fc2: linear(HIDDEN, OUTPUTS, 2) };
        let config = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01);
        Self { model, optimizer: config.init(), rate: LEARNING_RATE }
    }

    /// What is saved and loaded. A clone of a module shares its tensors.
    pub(crate) fn parts(&self) -> (BurnModel<Net>, BurnAdam) {
        let model = BurnModel::new(self.model.clone());
        let optimizer = BurnAdam::new(self.optimizer.clone(), &model)
            .option("lr", self.rate)
            .option("betas", Value::Tuple(vec![0.9.into(), 0.999.into()]))
            .option("eps", 1e-8)
            .option("weight_decay", 0.01);
        (model, optimizer)
    }

    pub(crate) fn replace(&mut self, model: BurnModel<Net>, optimizer: BurnAdam) {
        self.rate = optimizer.learning_rate().unwrap_or(self.rate);
        self.model = model.into_module();
        self.optimizer = optimizer.into_inner();
    }

    pub(crate) fn step(&mut self, step: u64, group: &dyn Collective) -> Result<f32> {
        let (rank, ranks) = (u64::from(group.rank()), u64::from(group.world_size()));
        let mut mine = Vec::new();
        for micro_batch in (0..MICRO_BATCHES).filter(|one| one % ranks == rank) {
            let (input, target) = batch(step, micro_batch);
            let difference = self.model.forward(input) - target;
            let loss = difference.powi_scalar(2).mean();
            mine.extend(elements(loss.clone())?);
            let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
            for linear in [&self.model.fc1, &self.model.fc2] {
                let weight = gradients.get::<2>(linear.weight.id).context("a gradient")?;
                let bias = linear.bias.as_ref().context("a bias")?.id;
                mine.extend(elements(weight)?);
                mine.extend(elements(gradients.get::<1>(bias).context("a gradient")?)?);
            }
        }
        let all = group.all_gather(bytemuck::cast_slice(&mine).to_vec().into())?;
        let all: Vec<Vec<f32>> =
            all.iter().map(|one| bytemuck::allocation::pod_collect_to_vec(one)).collect();
        let numbers = 1 + (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * OUTPUTS;
        let mut sum = vec![0.0_f32; numbers];
        for micro_batch in 0..MICRO_BATCHES {
            let part = &all[(micro_batch % ranks) as usize];
            let start = (micro_batch / ranks) as usize * numbers;
            sum.iter_mut().zip(&part[start..start + numbers]).for_each(|(sum, one)| *sum += one);
        }

        let mut means = sum.iter().map(|sum| sum / MICRO_BATCHES as f32);
        let loss = means.next().context("a loss")?;
        let mut gradients = GradientsParams::new();
        let plain = Device::default();
        for linear in [&self.model.fc1, &self.model.fc2] {
            let shape = linear.weight.val().dims();
            let weight: Vec<f32> = means.by_ref().take(shape[0] * shape[1]).collect();
            let bias: Vec<f32> = means.by_ref().take(shape[1]).collect();
            let weight = Tensor::<2>::from_data(TensorData::new(weight, shape), &plain);
            gradients.register(linear.weight.id, weight);
            let bias = Tensor::<1>::from_data(TensorData::new(bias, [shape[1]]), &plain);
            gradients.register(linear.bias.as_ref().context("a bias")?.id, bias);
        }
        self.model = self.optimizer.step(self.rate, self.model.clone(), gradients);
        Ok(loss)
    }
}

/// Trains until `steps` steps are done, those of earlier runs included.
pub(crate) fn train(
    group: Arc<dyn Collective>,
    folder: &str,
    steps: u64,
    mut done: impl FnMut(u64, f32),
) -> Result<()> {
    let mut learner = Learner::new();
    let manager = CheckpointManager::new(folder)
        .checkpointer(Checkpointer::in_group(Arc::clone(&group)))
        .schedule(SaveSchedule::new().every_steps(SAVE_EVERY));

    let (mut model, mut optimizer) = learner.parts();
    let mut state = TrainingState::new(&mut model, vec![&mut optimizer])?;
    let resumed = manager.resume(&mut state).blocking()?;
    if resumed.is_some() {
        learner.replace(model, optimizer);
    }
    let first = resumed.map_or(1, |resumed| resumed.step + 1);
    for step in first..=steps {
        let loss = learner.step(step, &*group)?;
        if manager.should_save(step).blocking()?.is_some() {
            let (mut model, mut optimizer) = learner.parts();
            let state = TrainingState::new(&mut model, vec![&mut optimizer])?;
            manager.save(step, &state).blocking()?;
        }
        if group.rank() == 0 {
            done(step, loss);
        }
    }
    Ok(())
}

pub(crate) fn device() -> Device {
    Device::default().autodiff()
}

pub(crate) fn elements<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    tensor.into_data().try_to_vec().map_err(|error| anyhow::anyhow!("{error:?}"))
}

/// Input and target of a micro-batch.
fn batch(step: u64, micro_batch: u64) -> (Tensor<2>, Tensor<2>) {
    let mut chance = Chance(step * MICRO_BATCHES + micro_batch);
    let mut of = |columns| {
        let elements: Vec<f32> = (0..ROWS * columns).map(|_| chance.next()).collect();
        Tensor::from_data(TensorData::new(elements, [ROWS, columns]), &device())
    };
    (of(INPUTS), of(OUTPUTS))
}

/// All rows of a step.
pub(crate) fn step_batch(step: u64) -> (Tensor<2>, Tensor<2>) {
    let (inputs, targets) = (0..MICRO_BATCHES).map(|one| batch(step, one)).unzip();
    (Tensor::cat(inputs, 0), Tensor::cat(targets, 0))
}

/// SplitMix64.
struct Chance(u64);

impl Chance {
    /// A number from -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}
