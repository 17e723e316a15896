//! The decision whether the ranks of a load share their reads, and which of them reads what.
//!
//! All ranks run it and know the same at each step, so all come to the same end without a vote. Each step
//! costs more than the one before, and only those go on that may gain more than that: 40 bytes of each
//! rank, then the plans, then a measurement of speeds.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::ReadReport;
use dcp_core::error::Phase;
use dcp_core::plan::LoadPlan;
use dcp_core::{CheckpointError, CheckpointMetadata, Rank};

use super::ReadSharing;
use super::assignment::{Assignment, Schedule};
use super::cost_model::Needs;
use super::division::Division;
use super::machines::machines;
use super::measured_speeds::measure;
use super::parallel_reader::{COORDINATOR, ParallelReader};
use super::sharers::{Offer, Sharers};
use crate::group::Group;

/// The items that this rank reads, and the ranks with which it may share that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) group: &'a Group,
    pub(super) metadata: &'a Arc<CheckpointMetadata>,
    pub(super) plan: &'a LoadPlan,
}

/// The way in which the ranks of a load read.
#[derive(Clone, Debug)]
pub(super) enum Way {
    Alone,
    Shared(Arc<Shared>),
}

/// The agreement of ranks about plans that they share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    offers: Vec<Offer>,
    pub(super) sharers: Sharers,
    pub(super) schedule: Schedule,
    pub(super) assignment: Assignment,
}

impl ParallelReader {
    /// Decides for a load, or for a round of one for which all ranks decided `earlier` to share. What a
    /// measurement has read is in the report.
    pub(super) async fn decide(
        &self,
        request: &Request<'_>,
        earlier: Option<&Arc<Shared>>,
    ) -> Result<(Way, ReadReport), CheckpointError> {
        let nothing = ReadReport::default();

        // Which ranks need the same? Their offers say that.
        let offers = self.exchange_offers(request).await?;
        if let Some(shared) = earlier.filter(|shared| shared.offers == offers) {
            return Ok((Way::Shared(Arc::clone(shared)), nothing));
        }
        let sharers = Sharers::of(&offers, self.replicas_only);
        if sharers.is_empty() {
            return Ok((Way::Alone, nothing));
        }

        // Could it be faster, by the bytes that each rank needs? Otherwise no plan is sent. Without
        // `replicas_only`, offers do not say what plans have in common.
        let must_pay = self.sharing == ReadSharing::Auto && earlier.is_none();
        let machines = machines(offers.iter().map(Offer::machine));
        if must_pay && self.replicas_only && !self.may_pay(sharers.needs(&offers, &machines)) {
            return Ok((Way::Alone, nothing));
        }

        // Who reads what, and sends it? The coordinator divides the plans.
        let divided = self.divide(request, (&offers, &sharers, machines)).await?;

        // Is it faster, by the speeds of all ranks?
        let (pays, report) = match must_pay {
            true => self.pays(request, &divided).await?,
            false => (true, nothing),
        };
        if !pays {
            return Ok((Way::Alone, report));
        }
        let (schedule, assignment) = divided;
        Ok((Way::Shared(Arc::new(Shared { offers, sharers, schedule, assignment })), report))
    }

    /// Whether a decision for sharing needs a measurement.
    fn measures(&self) -> bool {
        self.sharing == ReadSharing::Auto && self.speeds.is_none()
    }

    async fn exchange_offers(&self, request: &Request<'_>) -> Result<Vec<Offer>, CheckpointError> {
        let Request { group, metadata, plan } = request;
        let machine = self.machine.filter(|_| self.measures());
        let mine = Offer::of(metadata, plan, self.replicas_only, machine).to_wire();
        let offers = group.exchange(Phase::Plan, Ok(mine)).await?;
        offers.iter().map(|offer| Offer::from_wire(offer)).collect()
    }

    /// Whether sharing may be faster, with the least that a division could make ranks need.
    fn may_pay(&self, needs: Needs) -> bool {
        let may_pay = needs.could_share()
            && (!self.measures() || needs.are_worth_measuring() || needs.share_unmeasured());
        if !may_pay {
            tracing::debug!(?needs, "ranks read by themselves");
        }
        may_pay
    }

    /// Whether sharing is expected to be faster, by speeds that are measured if they are not given and
    /// the load is worth it.
    async fn pays(
        &self,
        request: &Request<'_>,
        (schedule, assignment): &(Schedule, Assignment),
    ) -> Result<(bool, ReadReport), CheckpointError> {
        let Request { group, metadata, .. } = request;
        let needs = schedule.needs;
        let (speeds, report) = match self.speeds {
            Some(speeds) => {
                let all = group.all_gather_results(Phase::Plan, Ok(speeds)).await?;
                (all, ReadReport::default())
            }
            None if !needs.are_worth_measuring() => {
                return Ok((needs.share_unmeasured(), ReadReport::default()));
            }
            None => {
                let (send, exchange) = (&assignment.send, self.exchange);
                let again = schedule.reads_again.then_some(&assignment.again);
                measure(group, &self.inner, metadata, send, again, exchange).await?
            }
        };
        let shares = needs.should_share(&speeds);
        tracing::debug!(?needs, ?speeds, shares, "chose how ranks read");
        Ok((shares, report))
    }

    /// Agrees on the reads of each rank.
    async fn divide(
        &self,
        request: &Request<'_>,
        (offers, sharers, machines): (&[Offer], &Sharers, Vec<Rank>),
    ) -> Result<(Schedule, Assignment), CheckpointError> {
        let Request { group, metadata, plan } = request;
        let world_size = self.collective.world_size();
        let sent = sharers.sent(self.collective.rank(), plan);
        let sent = sent.map_or_else(Bytes::new, |plan| plan.to_wire());
        let divided = group.gather(Phase::Read, sent).await?.map(|plans| {
            let decode = |plan: &Bytes| match plan.is_empty() {
                true => Ok(LoadPlan::default()),
                false => LoadPlan::from_wire(plan),
            };
            let plans = plans.iter().map(decode).collect::<Result<Vec<_>, _>>()?;
            let (rule, message_bytes) = (self.rule, self.message_bytes());
            let alone = sharers.alone(offers);
            let division = Division { world_size, machines, rule, message_bytes, alone };
            division.divide(metadata, &plans, &sharers.plan_of)
        });
        let (schedule, assignments) = match divided {
            Some(Ok((schedule, all))) => (Some(Ok(schedule.to_wire())), Some(all)),
            Some(Err(error)) => (Some(Err(error)), None),
            None => (None, None),
        };
        let schedule = group.broadcast(Phase::Plan, COORDINATOR, schedule).await?;
        let schedule = Schedule::from_wire(&schedule, world_size)?;
        let messages =
            assignments.map(|all| Ok((all.iter().map(Assignment::to_wire).collect(), ())));
        let (mine, _) = group.scatter(Phase::Plan, messages).await?;
        Ok((schedule, Assignment::from_wire(&mine)?))
    }
}
