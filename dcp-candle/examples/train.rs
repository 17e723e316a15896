//! Trains a small model on several processes, which share its rows and the rows of AdamW's moments,
//! and saves every third step. Started again, on any number of processes, it resumes; the losses are
//! the same bits as those of a run that never stopped.
//!
//! `train FOLDER STEPS`, in each process, with the variables of torchrun (`RANK`, `WORLD_SIZE`,
//! `MASTER_ADDR`, `MASTER_PORT`). Rank 0 prints a line per step.
#![allow(dead_code, clippy::print_stdout, reason = "a program, of which a test has a part")]

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, Optimizer, ParamsAdamW, VarMap};
use dcp::collectives::TcpConfig;
use dcp::jobs::run::SaveSchedule;
use dcp::manager::CheckpointManager;
use dcp::{Checkpointer, Collective};
use dcp_candle::{AdamW, VarMapModel};
use dcp_planner::mesh::{DeviceMesh, TensorPlacement, local_regions};
use dcp_state::TrainingState;

/// Names and shapes, as `torch.nn.Linear` has them.
const PARAMETERS: [(&str, [usize; 2]); 4] =
    [("fc1.weight", [13, 8]), ("fc1.bias", [13, 1]), ("fc2.weight", [5, 13]), ("fc2.bias", [5, 1])];
/// The gradients of a step are the sum of those of its micro-batches, in their order, whoever
/// computes them.
const MICRO_BATCHES: u64 = 6;
const ROWS: usize = 4;
const SAVE_EVERY: u64 = 3;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().context("usage: train FOLDER STEPS")?;
    let steps = args.next().context("usage: train FOLDER STEPS")?.parse()?;
    let group = Arc::new(TcpConfig::from_env()?.connect()?);
    train(group, &folder, steps, |step, loss| println!("{step} {loss}"))
}

/// Trains until `steps` steps are done, those of earlier runs included.
pub(crate) fn train(
    group: Arc<dyn Collective>,
    folder: &str,
    steps: u64,
    mut done: impl FnMut(u64, f32),
) -> Result<()> {
    let vars = VarMap::new();
    let mut model = sharded_model(&vars, &*group)?;
    let options = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::of(&model, options);
    let manager = CheckpointManager::new(folder)
        .checkpointer(Checkpointer::in_group(Arc::clone(&group)))
        .schedule(SaveSchedule::new().every_steps(SAVE_EVERY));

    let mut state = TrainingState::new(&mut model, vec![&mut optimizer])?;
    let resumed = manager.resume(&mut state).blocking()?;
    let first = resumed.map_or(1, |resumed| resumed.step + 1);
    for step in first..=steps {
        let loss = train_step(step, &vars, &mut optimizer, &*group)?;
        if manager.should_save(step).blocking()?.is_some() {
            let state = TrainingState::new(&mut model, vec![&mut optimizer])?;
            manager.save(step, &state).blocking()?;
        }
        if group.rank() == 0 {
            done(step, loss);
        }
    }
    Ok(())
}

/// The rows of each parameter that this rank has, as `Shard(0)` of PyTorch's `DTensor` divides them.
pub(crate) fn sharded_model(vars: &VarMap, group: &dyn Collective) -> Result<VarMapModel> {
    let mesh = DeviceMesh::new([u64::from(group.world_size())])?;
    let place = [u64::from(group.rank())];
    let mut shards = Vec::new();
    for (name, shape) in PARAMETERS {
        let whole = initial(name, shape)?;
        let shape = shape_of(name, shape);
        let regions = local_regions(&shape, &mesh, &place, &[TensorPlacement::Shard(0)])?;
        let Some(region) = regions.into_iter().next() else { continue };
        let (start, rows) = (region.offsets()[0] as usize, region.sizes()[0] as usize);
        let mine = whole.narrow(0, start, rows)?.contiguous()?;
        vars.get(mine.shape(), name, Init::Const(0.0), DType::F32, &Device::Cpu)?;
        vars.clone().set_one(name, &mine)?;
        shards.push((name, shape, region));
    }
    let model = VarMapModel::new(vars);
    Ok(shards
        .into_iter()
        .try_fold(model, |model, (name, shape, region)| model.shard(name, shape, region))?)
}

/// A bias has one axis.
fn shape_of(name: &str, shape: [usize; 2]) -> Vec<u64> {
    let axes = if name.ends_with("bias") { 1 } else { 2 };
    shape[..axes].iter().map(|size| *size as u64).collect()
}

fn initial(name: &str, shape: [usize; 2]) -> Result<Tensor> {
    let mut chance = Chance(name.len() as u64 * 31 + shape[1] as u64);
    let elements: Vec<f32> = (0..shape[0] * shape[1]).map(|_| chance.next() * 0.5).collect();
    let dims: Vec<usize> = shape_of(name, shape).iter().map(|size| *size as usize).collect();
    Ok(Tensor::from_vec(elements, dims, &Device::Cpu)?)
}

pub(crate) fn train_step(
    step: u64,
    vars: &VarMap,
    optimizer: &mut AdamW,
    group: &dyn Collective,
) -> Result<f32> {
    let whole = gather_parameters(vars, group)?;
    let (rank, ranks) = (u64::from(group.rank()), u64::from(group.world_size()));
    let mut mine = Vec::new();
    for micro_batch in (0..MICRO_BATCHES).filter(|one| one % ranks == rank) {
        let (input, target) = batch(step, micro_batch)?;
        let loss = logits(&whole, &input)?.sub(&target)?.sqr()?.mean_all()?;
        let gradients = loss.backward()?;
        mine.push(loss.to_scalar::<f32>()?);
        for parameter in &whole {
            let gradient = gradients.get(parameter).context("a gradient")?;
            mine.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    let all = group.all_gather(bytemuck::cast_slice(&mine).to_vec().into())?;
    let all: Vec<Vec<f32>> =
        all.iter().map(|one| bytemuck::allocation::pod_collect_to_vec(one)).collect();
    let numbers = 1 + whole.iter().map(|one| one.elem_count()).sum::<usize>();
    let mut sum = vec![0.0_f32; numbers];
    for micro_batch in 0..MICRO_BATCHES {
        let part = &all[(micro_batch % ranks) as usize];
        let start = (micro_batch / ranks) as usize * numbers;
        sum.iter_mut().zip(&part[start..start + numbers]).for_each(|(sum, one)| *sum += one);
    }

    let mut sums = sum[1..].iter().map(|sum| sum / MICRO_BATCHES as f32);
    let own = vars.data().lock().map_err(|_| anyhow::anyhow!("a poisoned map"))?.clone();
    let any = Var::new(0.0_f32, &Device::Cpu)?;
    let mut gradients = any.as_tensor().affine(1.0, 0.0)?.backward()?;
    for ((name, shape), whole) in PARAMETERS.into_iter().zip(&whole) {
        let gradient: Vec<f32> = sums.by_ref().take(whole.elem_count()).collect();
        let gradient = Tensor::from_vec(gradient, whole.shape(), &Device::Cpu)?;
        if let Some(var) = own.get(name) {
            let rows = shape[0].div_ceil(ranks as usize);
            let gradient = gradient.narrow(0, rows * rank as usize, var.dim(0)?)?;
            gradients.insert(var, gradient);
        }
    }
    optimizer.step(&gradients)?;
    Ok(sum[0] / MICRO_BATCHES as f32)
}

/// The whole parameters, from the rows of all ranks.
pub(crate) fn gather_parameters(vars: &VarMap, group: &dyn Collective) -> Result<Vec<Var>> {
    let own = vars.data().lock().map_err(|_| anyhow::anyhow!("a poisoned map"))?.clone();
    let gather = |(name, shape)| {
        let mine: Vec<f32> = match own.get(name) {
            Some(var) => var.flatten_all()?.to_vec1()?,
            None => Vec::new(),
        };
        let all = group.all_gather(bytemuck::cast_slice(&mine).to_vec().into())?;
        let elements: Vec<f32> = bytemuck::allocation::pod_collect_to_vec(&all.concat());
        let dims: Vec<usize> = shape_of(name, shape).iter().map(|size| *size as usize).collect();
        Ok(Var::from_vec(elements, dims, &Device::Cpu)?)
    };
    PARAMETERS.into_iter().map(gather).collect()
}

pub(crate) fn logits(parameters: &[Var], input: &Tensor) -> Result<Tensor> {
    let [weight1, bias1, weight2, bias2] = parameters else { anyhow::bail!("four parameters") };
    let hidden = input.matmul(&weight1.t()?)?.broadcast_add(bias1)?.relu()?;
    Ok(hidden.matmul(&weight2.t()?)?.broadcast_add(bias2)?)
}

/// Input and target of a micro-batch.
fn batch(step: u64, micro_batch: u64) -> Result<(Tensor, Tensor)> {
    let mut chance = Chance(step * MICRO_BATCHES + micro_batch);
    let mut of = |columns| {
        let elements: Vec<f32> = (0..ROWS * columns).map(|_| chance.next()).collect();
        Tensor::from_vec(elements, (ROWS, columns), &Device::Cpu)
    };
    Ok((of(PARAMETERS[0].1[1])?, of(PARAMETERS[2].1[0])?))
}

/// All rows of a step.
pub(crate) fn step_batch(step: u64) -> Result<(Tensor, Tensor)> {
    let batches: Vec<_> = (0..MICRO_BATCHES).map(|one| batch(step, one)).collect::<Result<_>>()?;
    let (inputs, targets): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
    Ok((Tensor::cat(&inputs, 0)?, Tensor::cat(&targets, 0)?))
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
