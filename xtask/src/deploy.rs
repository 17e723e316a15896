//! The job files of `deploy/`: run on a Slurm of one node, and checked for Kubernetes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use xtask_host::process::{Scratch, output, run, succeeds};
use xtask_host::{Result, port, venv, workspace};

/// What a cluster of Slurm consists of. Debian has it in slurm-wlm and munge.
const SLURM: [&str; 5] = ["munged", "slurmctld", "slurmd", "srun", "sbatch"];
/// Tasks on the only node.
const TASKS: &str = "3";
/// How long the node may take until it is up, and a job until it has ended.
const LIMIT: Duration = Duration::from_secs(120);

/// Checks the files as far as this machine can.
pub(crate) fn main() -> Result {
    let files = files("slurm", "sbatch")?;
    for file in &files {
        run(Command::new("bash").arg("-n").arg(file))?;
    }
    kubernetes()?;
    let missing = SLURM.iter().find(|program| program_path(program).is_none());
    if let Some(program) = missing {
        println!("SKIPPED: the jobs do not run, there is no {program} here (slurm-wlm, munge)");
        return Ok(());
    }
    if output(Command::new("id").arg("-u"))?.trim() != "0" {
        println!("SKIPPED: the jobs do not run, only root can start a node of Slurm");
        return Ok(());
    }
    workspace::build()?;
    let scratch = Scratch::new(&std::env::temp_dir(), "dcp-slurm", false)?;
    let cluster = Cluster::start(scratch.path())?;
    for file in &files {
        cluster.submit(file)?;
    }
    Ok(())
}

fn files(folder: &str, ending: &str) -> Result<Vec<PathBuf>> {
    let folder = workspace::root().join("deploy").join(folder);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        files.push(entry?.path());
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == ending));
    files.sort();
    if files.is_empty() { Err(format!("no .{ending} files").into()) } else { Ok(files) }
}

fn program_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| file.exists())
}

/// Compares the manifests with the schemas of Kubernetes and JobSet, where their packages can be had.
fn kubernetes() -> Result {
    let files = files("kubernetes", "yaml")?;
    let python = match venv::kubernetes() {
        Ok(python) => python,
        Err(error) => {
            println!("SKIPPED: the manifests are not compared with schemas: {error}");
            return Ok(());
        }
    };
    let script = workspace::root().join("xtask/python/kubernetes_schemas.py");
    run(Command::new(python).arg(script).args(files))
}

/// A Slurm of this machine alone, in a folder; it ends when it is dropped.
struct Cluster<'a> {
    folder: &'a Path,
}

impl<'a> Cluster<'a> {
    fn start(folder: &'a Path) -> Result<Self> {
        let cluster = Self { folder };
        let at = |name: &str| folder.join(name);
        fs::create_dir_all(at("state"))?;
        fs::create_dir_all(at("spool"))?;
        let host = output(Command::new("hostname").arg("-s"))?.trim().to_owned();
        let mut random = vec![0; 1024];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut random)?;
        fs::write(at("munge.key"), random)?;
        run(Command::new("chmod").arg("400").arg(at("munge.key")))?;
        run(Command::new("chmod").arg("755").arg(folder))?;
        let option = |name: &str, file: &str| format!("--{name}={}", at(file).display());
        run(cluster.program("munged").arg("--force").args([
            option("key-file", "munge.key"),
            option("socket", "munge.socket"),
            option("pid-file", "munged.pid"),
            option("log-file", "munged.log"),
            option("seed-file", "munge.seed"),
        ]))?;
        // Held until the node is up.
        let [(_controller, controller), (_node, node)] = [port::reserved()?, port::reserved()?];
        fs::write(at("slurm.conf"), configuration(folder, &host, controller, node))?;
        run(cluster.program("slurmctld").arg("-c").arg("-f").arg(at("slurm.conf")))?;
        let mut node = cluster.program("slurmd");
        run(node.arg("-c").args(["-N", &host]).arg("-f").arg(at("slurm.conf")))?;
        let begun = Instant::now();
        while !output(cluster.program("sinfo").args(["--noheader", "--format=%t"]))?
            .contains("idle")
        {
            if begun.elapsed() > LIMIT {
                let log = fs::read_to_string(at("slurmctld.log")).unwrap_or_default();
                return Err(format!("the node does not come up:\n{log}").into());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(cluster)
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(program_path(name).unwrap_or_else(|| name.into()));
        command.env("SLURM_CONF", self.folder.join("slurm.conf"));
        command
    }

    /// Runs a job on the node, with tasks of which each is a rank, and shows what it prints.
    fn submit(&self, file: &Path) -> Result {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let printed = self.folder.join(format!("{name}.out"));
        let built = workspace::target()?.join("debug");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut job = self.program("sbatch");
        job.args(["--wait", "--nodes=1", "--mem-per-cpu=0", "--cpus-per-task=1"])
            .arg(format!("--ntasks-per-node={TASKS}"))
            .arg(format!("--output={}", printed.display()))
            .arg(file)
            .arg(workspace::root().join("fixtures/pytorch/fsdp2_adam_2r"))
            .arg(self.folder.join(format!("{name}.target")))
            .env("DCP_SECRET_FILE", self.folder.join("job.secret"))
            .env("PATH", format!("{}:{path}", built.display()));
        let done = run(&mut job);
        let printed = fs::read_to_string(printed).unwrap_or_default();
        println!("{printed}");
        done?;
        if printed.contains("every byte read") && printed.matches("every byte read").count() == 1 {
            return Ok(());
        }
        Err(format!("{name} did not run as one command of {TASKS} ranks").into())
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        for daemon in ["slurmd", "slurmctld", "munged"] {
            let pid = fs::read_to_string(self.folder.join(format!("{daemon}.pid")));
            if let Ok(pid) = pid {
                succeeds(Command::new("kill").arg(pid.trim()));
            }
        }
    }
}

fn configuration(folder: &Path, host: &str, controller: u16, node: u16) -> String {
    let folder = folder.display();
    format!(
        "ClusterName=dcp\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\n\
         SlurmdPort={node}\nAuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\n\
         CredType=cred/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
         SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSwitchType=switch/none\n\
         MpiDefault=none\nSlurmdParameters=config_overrides\nReturnToService=2\nSlurmUser=root\n\
         SlurmdUser=root\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n\
         SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n\
         SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.log\n\
         JobAcctGatherType=jobacct_gather/none\n\
         NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=1000 State=UNKNOWN\n\
         PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of `key:` in a manifest.
    fn values<'a>(manifest: &'a str, key: &str) -> Vec<&'a str> {
        let lines = manifest.lines().filter_map(|line| line.trim().strip_prefix(key));
        lines.map(|value| value.trim().trim_matches('"')).collect()
    }

    /// The value of an environment variable in a manifest.
    fn variable<'a>(manifest: &'a str, name: &str) -> &'a str {
        let (_, after) = manifest.split_once(&format!("- name: {name}\n")).unwrap();
        values(after, "value:")[0]
    }

    #[test]
    fn the_ranks_of_a_manifest_are_as_many_as_its_pods_and_find_the_first() {
        for file in files("kubernetes", "yaml").unwrap() {
            let manifest = fs::read_to_string(&file).unwrap();
            let ranks = variable(&manifest, "WORLD_SIZE");
            assert_eq!(values(&manifest, "completions:"), [ranks], "{file:?}");
            assert_eq!(values(&manifest, "parallelism:"), [ranks], "{file:?}");
            assert_eq!(values(&manifest, "completionMode:"), ["Indexed"], "{file:?}");
            assert_eq!(values(&manifest, "restartPolicy:"), ["Never"], "{file:?}");
            let job = *values(&manifest, "name:").first().unwrap();
            let is_set = manifest.contains("kind: JobSet");
            let first = if is_set { format!("{job}-ranks-0-0") } else { format!("{job}-0") };
            assert_eq!(variable(&manifest, "MASTER_ADDR"), format!("{first}.{job}"), "{file:?}");
        }
    }
}
