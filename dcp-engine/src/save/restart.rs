//! Plans that outlive the process.

use std::sync::Arc;

use dcp_core::digest::sha256;
use dcp_core::plan::{GlobalPlan, WritePlan};
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointMetadata, PlanError};

use super::Saver;
use crate::memory::Remembered;
use crate::messages::plan_id;
use crate::packed;
use crate::settings::Settings;

const MAGIC: [u8; 4] = *b"dpr2";
/// The length of a SHA-256.
const DIGEST_LEN: usize = 32;

impl Saver {
    /// The plan of the last save as bytes, for [`import_plans`](Self::import_plans) on the same rank
    /// after a restart; `None` before the first save. The coordinator's contain the whole index.
    ///
    /// A job keeps them where it keeps other state of a rank, and all ranks export after the same
    /// save.
    #[must_use]
    pub fn export_plans(&self) -> Option<Vec<u8>> {
        let memory = self.memory.as_ref()?;
        let mine = memory.last()?;
        let global =
            memory.plans.entries().into_iter().find(|(key, _)| plan_id(key) == mine.plan_id);
        let mut out = MessageWriter::new(MAGIC);
        self.identity().iter().for_each(|setting| out.text(setting));
        out.bytes(&mine.fingerprint.to_le_bytes());
        out.bytes(&mine.plan_id.to_le_bytes());
        out.bytes(&mine.plan.to_wire());
        out.number(global.as_ref().map_or(0, |(key, _)| key.len() as u64));
        if let Some((key, plan)) = global {
            key.iter().for_each(|part| out.bytes(&part.to_le_bytes()));
            out.bytes(&plan.metadata.to_wire());
        }
        let mut bytes = out.finish().to_vec();
        bytes.extend(sha256(&bytes));
        Some(bytes)
    }

    /// Remembers a plan that [`export_plans`](Self::export_plans) returned, so that the first save
    /// after a restart reuses it. When a rank has none, or the structure of the state has changed
    /// on any rank, the next save plans as the first one of a process does.
    ///
    /// Planners return the same plan for the same offers; one with settings shows them in its
    /// `Debug` form, by which a plan of other settings is recognized.
    ///
    /// # Errors
    ///
    /// When the bytes are damaged, or of another rank, group size, coordinator, planner or version
    /// of this crate. Nothing is remembered then.
    pub fn import_plans(&self, bytes: &[u8]) -> Result<(), PlanError> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let digest_at = bytes.len().checked_sub(DIGEST_LEN);
        let (message, _) = digest_at
            .and_then(|at| bytes.split_at_checked(at))
            .filter(|(message, digest)| sha256(message) == **digest)
            .ok_or_else(|| refused("they are damaged; remove them"))?;
        let mut input = MessageReader::new(message, MAGIC)?;
        for setting in self.identity() {
            let found = input.text()?;
            if found != setting {
                return Err(refused(&format!("they are of {found:?}, this is {setting:?}")));
            }
        }
        let fingerprint = u128::from_le_bytes(packed::array(&mut input)?);
        let id = u64::from_le_bytes(packed::array(&mut input)?);
        let plan = WritePlan::from_wire(input.bytes()?)?;
        let parts = input.count()?;
        let mut key = Vec::new();
        for _ in 0..parts {
            key.push(u128::from_le_bytes(packed::array(&mut input)?));
        }
        let global = match key.is_empty() {
            true => None,
            false => Some(CheckpointMetadata::from_wire(input.bytes()?)?),
        };
        input.finish()?;
        if let Some(metadata) = global {
            let plan = GlobalPlan { metadata, ..GlobalPlan::default() };
            memory.plans.insert(key, Arc::new(plan));
        }
        memory.keep(Remembered { fingerprint, plan_id: id, plan: Arc::new(plan) });
        Ok(())
    }

    /// The settings that a plan depends on besides the state and the writer.
    fn identity(&self) -> [String; 3] {
        let Settings { save_planner, .. } = &self.settings;
        let (rank, world) = (self.settings.rank(), self.settings.world_size());
        let coordinator = self.settings.coordinator_rank();
        [
            format!("dcp-engine {}", env!("CARGO_PKG_VERSION")),
            format!("rank {rank} of {world} with coordinator {coordinator}"),
            format!("{:?}", save_planner),
        ]
    }
}

fn refused(problem: &str) -> PlanError {
    let message = "the exported plans of a saver".to_owned();
    PlanError::message(message, problem)
}
