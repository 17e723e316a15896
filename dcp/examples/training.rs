//! A training loop on any number of ranks: it resumes from the newest valid checkpoint of a run, saves in the
//! background while it trains, and keeps the last two checkpoints.
//!
//! ```sh
//! cargo run -p distcp --example training -- /tmp/run 40
//! torchrun --no-python --nproc-per-node 2 target/debug/examples/training /tmp/run 80
//! ```
//!
//! The second line resumes with two ranks what one has saved.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;

use dcp::jobs::run::{KeepLast, SaveSchedule};
use dcp::manager::{CheckpointManager, PendingStep, Preemption, SaveReason};
use dcp::{Checkpointer, DType, LoadMode, Region, Settings, Shard, StateDict, Tensor, Value};

/// Rows and columns of the weight.
const SHAPE: [u64; 2] = [64, 8];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let run = args.next().ok_or("usage: training RUN [STEPS]")?;
    let steps: u64 = args.next().map_or(Ok(40), |steps| steps.parse())?;

    // A group for checkpoints alone: a background save uses it while the trainer uses its own.
    let group = dcp::collectives::from_env_or_solo()?;
    let (rank, ranks) = (u64::from(group.rank()), u64::from(group.world_size()));
    // The state of this rank's random generator is not in a checkpoint of fewer ranks.
    let settings = Settings::in_group(group).load_mode(LoadMode::AllowMissing);
    let manager = CheckpointManager::new(&run)
        .checkpointer(Checkpointer::with_settings(settings))
        .schedule(SaveSchedule::new().every_steps(10))
        .keep(KeepLast(2))
        .preemption(Preemption::on_sigterm()?);

    let first_row = SHAPE[0] * rank / ranks;
    let rows = Region::new([first_row, 0], [SHAPE[0] * (rank + 1) / ranks - first_row, SHAPE[1]])?;
    let mut weight = vec![0.0_f32; usize::try_from(rows.sizes().iter().product::<u64>())?];
    let mut random = u64::MAX - rank;

    let mut state = state_of(&weight, &rows, rank, random)?;
    let resumed = manager.resume(&mut state).blocking()?;
    if let Some(resumed) = &resumed {
        if let Some(Value::Tensor(loaded)) = state.get("weight") {
            weight = loaded.shards()[0].to_vec_of()?;
        }
        let key = random_key(rank);
        random = state.get(&key).and_then(Value::as_u64).ok_or("no random state")?;
        println!("rank {rank} resumes after step {}", resumed.step);
    }

    let mut pending: Option<PendingStep> = None;
    for step in resumed.map_or(1, |resumed| resumed.step + 1)..=steps {
        // A step of training.
        for element in &mut weight {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *element += (random >> 40) as f32 / 1e9;
        }
        let Some(reason) = manager.should_save(step).blocking()? else { continue };
        if let Some(pending) = pending.take() {
            pending.wait().blocking()?;
        }
        // The state is copied before `background` returns, so that training can change it.
        let state = state_of(&weight, &rows, rank, random)?;
        let loss = f64::from(weight.iter().sum::<f32>());
        pending = Some(manager.save(step, &state).metric("loss", loss).background()?);
        if reason == SaveReason::Preemption {
            break;
        }
    }
    if let Some(pending) = pending {
        let saved = pending.wait().blocking()?;
        println!("rank {rank} has saved step {}", saved.step);
    }
    Ok(())
}

/// The rows of this rank, and the state of its random generator under a key of its own: a key that
/// several ranks have holds one value for all of them.
fn state_of(
    weight: &[f32],
    rows: &Region,
    rank: u64,
    random: u64,
) -> Result<StateDict, Box<dyn Error>> {
    let shard = Shard::from_vec(weight.to_vec(), rows.clone())?;
    let mut state = StateDict::new();
    state.insert("weight", Tensor::sharded(DType::Float32, SHAPE, vec![shard])?);
    state.insert(random_key(rank), random);
    Ok(state)
}

fn random_key(rank: u64) -> String {
    format!("random.{rank}")
}
