//! `dcp prune`.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use dcp::core::text::{Message, Quoted};
use dcp::jobs::run::{
    AnyOf, KeepBest, KeepEvery, KeepLast, KeepYoungerThan, Prune as Deletion, PrunePlan,
    PruneReport, SkippedStep, StepOrder,
};
use dcp::jobs::text::count;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::options::parse_duration;
use crate::output::Output;
use crate::output::render::prune;
use crate::output::style::{printable, size};
use crate::session::Session;

/// Delete checkpoints of a run: keep the last, every so many steps, or the best.
///
/// A checkpoint stays if one of the options keeps it. Whatever the options, these stay: the newest
/// complete checkpoint, pinned ones, those that the run names (the tracker of Megatron-LM and veRL,
/// `latest` of DeepSpeed, the best checkpoint of a trainer), those that
/// a saver holds, files, and folders that are not named after a step (step-40, step_40, step40,
/// iter_0000040, checkpoint-40, global_step40, global_step_40, ep0-ba40, epoch=3-step=40.ckpt, epoch_4).
///
/// Complete is what its own format finds complete: before anything is deleted, each checkpoint is
/// looked at, and the newest one is verified as `dcp verify` does it. If it is damaged, the newest whole one
/// stays, too, and if none is whole, nothing is deleted. Where the highest step is not the newest, --by says which order counts.
///
/// The files that make a checkpoint visible go first, so a deletion that is stopped leaves no half
/// checkpoint that seems complete. The next prune finishes it.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp prune runs/llama --keep-last 3 --dry-run
  dcp prune runs/llama --keep-last 3 --keep-every 10000 --yes
  dcp prune s3://models/llama --keep-best 2 --metric eval_loss --lowest --keep-last 1
  dcp prune runs/llama --older-than 30d --deep --yes
  dcp prune runs/llama --pin 40000                        keep this step in every later prune
  dcp prune runs/llama --incomplete --dry-run             what killed saves left

  A trainer records metrics when it saves (`CheckpointManager`); those of transformers are read from
  trainer_state.json, those of Lightning from meta.pt. Another program writes them into the folder of
  a checkpoint, as .dcp-metrics.json: {\"metrics\": {\"eval_loss\": 2.31}}

JSON:
  {\"dry_run\", \"steps\": [STEP, …], \"skipped\": [{\"name\", \"step\", \"problem\"}, …],
   \"deleted\": [{\"name\", \"step\", \"files\", \"bytes\"}, …], \"files\", \"bytes\", \"others\": [NAME, …],
   \"unclear_notes\": [TEXT, …],
   \"leftovers\": [{\"path\", \"kind\", \"bytes\", \"modified\"}, …],
   \"not_deleted\": [{\"name\", \"step\", \"reason\", \"failed\"}, …]}
  STEP is {\"name\", \"step\", \"format\", \"complete\", \"problem\", \"files\", \"bytes\", \"modified\",
           \"metrics\", \"pinned\", \"tracked\", \"named_by\", \"deleting\", \"delete\", \"reason\"}, and
           \"strays\" as of dcp ls; skipped are
           checkpoints newer than the newest one that verifies. In a dry run deleted is empty,
           and files, bytes and leftovers are what would be removed. The kind of a leftover is
           temporary_file or open_upload; stores do not say the bytes of an open upload.")]
pub(crate) struct Prune {
    /// The folder of a run.
    run: String,

    /// Keep the last K checkpoints.
    #[arg(long, value_name = "K", help_heading = "What is kept")]
    keep_last: Option<usize>,

    /// Keep the checkpoints of every N-th step.
    #[arg(long, value_name = "N", help_heading = "What is kept", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,

    /// Keep the K checkpoints with the highest value of a metric, and those of which it is unknown.
    #[arg(long, value_name = "K", requires = "metric", help_heading = "What is kept")]
    keep_best: Option<usize>,

    /// The metric of --keep-best.
    #[arg(long, value_name = "NAME", requires = "keep_best", help_heading = "What is kept")]
    metric: Option<String>,

    /// The lowest values of the metric are the best, as of a loss.
    #[arg(long, requires = "keep_best", help_heading = "What is kept")]
    lowest: bool,

    /// The highest values are the best, as without --lowest. Needed where the name of the metric is that
    /// of a loss.
    #[arg(long, requires = "keep_best", conflicts_with = "lowest", help_heading = "What is kept")]
    highest: bool,

    /// Which checkpoint is newer: that of the higher step, or the one that was written later. Needed
    /// where the two disagree, as in a run that was started again.
    #[arg(long, value_enum, value_name = "ORDER", help_heading = "What is kept")]
    by: Option<By>,

    /// Delete only checkpoints that were written longer ago than this, such as 30d, 12h or 90min.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, help_heading = "What is kept")]
    older_than: Option<Duration>,

    /// Pin the checkpoint of this step: no prune and no trainer deletes it. Can be given several times.
    #[arg(long, value_name = "STEP", conflicts_with = "dry_run", help_heading = "What is kept")]
    pin: Vec<u64>,

    /// End the pin of the checkpoint of this step.
    #[arg(long, value_name = "STEP", conflicts_with = "dry_run", help_heading = "What is kept")]
    unpin: Vec<u64>,

    /// Delete what killed saves left: incomplete checkpoints, temporary files, and open uploads on S3
    /// and Google Cloud Storage. Azure lists no open uploads, and removes their blocks after a week.
    #[arg(long)]
    incomplete: bool,

    /// The age from which --incomplete deletes; a younger save may go on.
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = parse_duration)]
    min_age: Duration,

    /// Compare every byte of the checkpoint that has to be whole with its checksum. Without it, its index and its
    /// small objects are read.
    #[arg(long)]
    deep: bool,

    /// Print what would be deleted and why, and delete nothing.
    #[arg(long)]
    dry_run: bool,

    /// Delete without asking. Without a terminal nothing is deleted otherwise.
    #[arg(short, long, conflicts_with = "dry_run")]
    yes: bool,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The values of `--by`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum By {
    /// The number of the step.
    Step,
    /// The time of the last write.
    Time,
}

impl Prune {
    /// What is kept, where an option says so.
    fn policy(&self) -> AnyOf {
        let mut policy = AnyOf::new();
        if let Some(last) = self.keep_last {
            policy = policy.or(KeepLast(last));
        }
        if let Some(every) = self.keep_every {
            policy = policy.or(KeepEvery(every));
        }
        if let (Some(best), Some(metric)) = (self.keep_best, &self.metric) {
            policy = policy.or(match self.lowest {
                true => KeepBest::lowest(best, metric),
                false => KeepBest::highest(best, metric),
            });
        }
        if let Some(age) = self.older_than {
            policy = policy.or(KeepYoungerThan(age));
        }
        policy
    }

    fn deletion(&self, session: &Session) -> Deletion {
        let mut deletion = session.opener().run(&self.run).prune();
        let policy = self.policy();
        if !policy.is_empty() {
            deletion = deletion.policy(policy);
        }
        if let Some(by) = self.by {
            deletion = deletion.by(match by {
                By::Step => StepOrder::Step,
                By::Time => StepOrder::Time,
            });
        }
        if self.incomplete {
            deletion = deletion.incomplete(self.min_age);
        }
        deletion.deep(self.deep)
    }
}

/// Refuses to take the highest losses as the best only because no option says otherwise.
fn refuse_guessed_order(args: &Prune) -> Result<(), Failure> {
    match &args.metric {
        Some(metric) if !args.lowest && !args.highest && KeepBest::is_loss(metric) => {
            let message =
                format!("the name {metric:?} is that of a loss, and --keep-best keeps the highest");
            Err(Failure::new(Exit::Usage, message)
                .hint("--lowest keeps the lowest values, --highest the highest"))
        }
        _ => Ok(()),
    }
}

pub(crate) fn prune(args: &Prune, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    if session.follow_links {
        return Err(Failure::new(Exit::Usage, "prune follows no links out of a run")
            .hint("leave out --follow-links; name the folder that a link leads to"));
    }
    if let Some(step) = args.pin.iter().find(|step| args.unpin.contains(step)) {
        let message = format!("--pin {step} and --unpin {step} say the opposite of each other");
        return Err(Failure::new(Exit::Usage, message).hint("leave one of them out"));
    }
    refuse_guessed_order(args)?;
    let has_pins = !args.pin.is_empty() || !args.unpin.is_empty();
    if args.policy().is_empty() && !args.incomplete && !has_pins {
        return Err(Failure::new(Exit::Usage, "no option says which checkpoints are kept").hint(
            "--keep-last 3 keeps the last three; `dcp prune --help` lists all options. --dry-run \
             shows what they delete",
        ));
    }
    if has_pins {
        pin(args, session)?;
        if args.policy().is_empty() && !args.incomplete {
            return Ok(());
        }
    }
    let deletion = args.deletion(session);
    let plan = session.run(true, async { Ok(deletion.plan().await?) })?;
    let report = match args.dry_run || !(args.yes || is_confirmed(args, &plan, out)?) {
        true => None,
        false => Some(session.run(true, async { Ok(deletion.apply(&plan).await?) })?),
    };
    if args.json {
        out.json(&in_json(&plan, report.as_ref()))?;
    } else if let Some(report) = &report {
        if !out.quiet {
            out.write(&prune::report(&args.run, report, out))?;
        }
    } else if args.dry_run {
        out.write(&prune::plan(&args.run, &plan, out))?;
    }
    for problem in &plan.unclear_notes {
        out.note(&format!(
            "no complete checkpoint is deleted, as any may be the best one: {problem}; a newer state of \
             the trainer decides, or move the file out of the run"
        ));
    }
    let is_complete = |skipped: &&SkippedStep| {
        plan.steps.iter().any(|one| one.step.name == skipped.name && one.step.is_complete())
    };
    for skipped in plan.skipped.iter().filter(is_complete) {
        let problem = Message(&skipped.problem);
        out.note(&format!("{} does not verify: {problem}", printable(&skipped.name)));
    }
    note_others(&plan.others, out);
    let Some(report) = report else { return Ok(()) };
    for one in &report.deleted {
        if let Some(reason) = &one.folder_stays {
            out.note(&format!("the folder of {} is still there: {reason}", one.name));
        }
    }
    let failed: Vec<_> = report.not_deleted.iter().filter(|one| one.failed).collect();
    for kept in report.not_deleted.iter().filter(|one| !one.failed) {
        out.note(&format!("{} stays: {}", kept.name, kept.reason));
    }
    if failed.is_empty() {
        return Ok(());
    }
    let what = count(failed.len(), "checkpoint");
    let reasons = failed.iter().map(|one| format!("{}: {}", one.name, one.reason)).collect();
    Err(Failure::new(Exit::Io, format!("{what} could not be deleted"))
        .because(reasons)
        .hint("run the same command again: it finishes what was begun"))
}

/// Notes what is no checkpoint of a step.
fn note_others(others: &[String], out: &Output) {
    const SHOWN: usize = 4;
    if others.is_empty() {
        return;
    }
    let shown: Vec<_> = others.iter().take(SHOWN).map(|name| Quoted(name).to_string()).collect();
    let more = if others.len() > SHOWN { ", …" } else { "" };
    let what = match others.len() {
        1 => "1 file or folder that is no checkpoint of a step stays".to_owned(),
        many => format!("{many} files and folders that are no checkpoints of steps stay"),
    };
    out.note(&format!("{what}: {}{more}", shown.join(", ")));
}

fn pin(args: &Prune, session: &Session) -> Result<(), Failure> {
    session.run(false, async {
        let run = session.opener().run(&args.run);
        for step in &args.unpin {
            run.unpin(*step).await?;
            session.out.note(&format!("step {step} is no longer pinned"));
        }
        for step in &args.pin {
            run.pin(*step).await?;
            session.out.note(&format!("step {step} is pinned"));
        }
        Ok(())
    })
}

/// Requests a confirmation of the plan on a terminal.
fn is_confirmed(args: &Prune, plan: &PrunePlan, out: &Output) -> Result<bool, Failure> {
    let steps = plan.deleted().count();
    if steps == 0 && !args.incomplete {
        return Ok(true);
    }
    let bytes = plan.deleted().map(|step| step.bytes).fold(0, u64::saturating_add);
    let what = format!("{} ({})", count(steps, "checkpoint"), size(bytes));
    if args.json || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let message = format!("{what} of {} would be deleted", Message(&printable(&args.run)));
        return Err(Failure::new(Exit::Usage, message)
            .hint("--yes deletes without asking; --dry-run shows which, and why"));
    }
    out.write(&prune::plan(&args.run, plan, out))?;
    let mut stderr = std::io::stderr();
    write!(stderr, "delete {what}? [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    let yes = matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    if !yes {
        out.note("nothing was deleted");
    }
    Ok(yes)
}

fn in_json(plan: &PrunePlan, report: Option<&PruneReport>) -> serde_json::Value {
    let planned = |of: fn(&dcp::jobs::run::RunStep) -> u64| {
        plan.deleted().map(of).fold(0, u64::saturating_add)
    };
    let nothing = PruneReport::default();
    let done = report.unwrap_or(&nothing);
    json!({
        "dry_run": report.is_none(),
        "steps": plan.steps,
        "skipped": plan.skipped,
        "others": plan.others,
        "unclear_notes": plan.unclear_notes,
        "deleted": done.deleted,
        "not_deleted": report.map_or(&plan.not_deleted, |report| &report.not_deleted),
        "files": report.map_or_else(|| planned(|step| step.files), |report| report.files),
        "bytes": report.map_or_else(|| planned(|step| step.bytes), |report| report.bytes),
        "leftovers": report.map_or(&plan.leftovers, |report| &report.leftovers),
    })
}
