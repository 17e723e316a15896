//! Environments as launchers set them.

use proptest::prelude::*;

use super::meeting_point::first_host;
use super::*;

type Set<'a> = &'a [(&'a str, &'a str)];

fn read(variables: Set<'_>) -> Result<Option<Launch>, EnvError> {
    Launch::from_variables(|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

/// Launcher, rank, world size and `host:port` of variables that are complete.
fn found(variables: Set<'_>) -> (Launcher, u32, u32, String) {
    let launch = read(variables).unwrap().unwrap();
    let config = launch.tcp().unwrap();
    let master = format!("{}:{}", config.master_host(), config.master_port());
    (launch.launcher, launch.rank, launch.world_size, master)
}

fn with<'a>(base: Set<'a>, more: Set<'a>) -> Vec<(&'a str, &'a str)> {
    more.iter().chain(base).copied().collect()
}

fn without<'a>(base: Set<'a>, name: &str) -> Vec<(&'a str, &'a str)> {
    base.iter().filter(|(known, _)| *known != name).copied().collect()
}

/// As torchrun 2.15 sets them with a static rendezvous.
const TORCHRUN: Set<'_> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

/// As `env://` needs them.
const PYTORCH: Set<'_> =
    &[("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500"), ("RANK", "3"), ("WORLD_SIZE", "4")];

/// As `srun` sets them.
const SRUN: Set<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_PROCID", "5"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_JOB_NODELIST", "login,gpu[001-004]"),
    ("SLURM_STEP_NODELIST", "gpu[003-004,17]"),
];

/// As `sbatch --ntasks 8` sets them in the script.
const SBATCH: Set<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_JOB_NODELIST", "gpu[003-004]"),
];

/// As `mpirun -n 4` of Open MPI 5 sets them on one host.
const OPEN_MPI: Set<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_RANK", "2"),
    ("PMIX_NAMESPACE", "prterun-host-123@1"),
];

/// As `mpiexec -n 4` of Intel MPI sets them on one host.
const PMI: Set<'_> = &[
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "4"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "4"),
    ("MASTER_PORT", "4000"),
];

/// As a pod of an indexed Job has them, with the variables of our job file.
const INDEXED_JOB: Set<'_> =
    &[("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "dcp-0.dcp")];

#[test]
fn each_launcher_is_found() {
    use Launcher::{Explicit, Kubernetes, OpenMpi, Pmi, Slurm, Torch};
    assert_eq!(found(TORCHRUN), (Torch, 3, 4, "node0:29501".into()));
    assert_eq!(found(PYTORCH), (Torch, 3, 4, "node0:29500".into()));
    assert_eq!(found(PMI), (Pmi, 1, 4, "127.0.0.1:4000".into()));
    assert_eq!(found(INDEXED_JOB), (Kubernetes, 1, 4, "dcp-0.dcp:29500".into()));
    let explicit = [
        ("DCP_RANK", "0"),
        ("DCP_WORLD_SIZE", "2"),
        ("DCP_MASTER_ADDR", "h"),
        ("DCP_MASTER_PORT", "7000"),
    ];
    assert_eq!(found(&with(OPEN_MPI, &explicit)), (Explicit, 0, 2, "h:7000".into()));
    let (launcher, rank, world_size, master) = found(SRUN);
    assert_eq!((launcher, rank, world_size), (Slurm, 5, 8));
    assert!(master.starts_with("gpu003:2"), "{master}");
    let (launcher, rank, world_size, master) = found(OPEN_MPI);
    assert_eq!((launcher, rank, world_size), (OpenMpi, 2, 4));
    assert!(master.starts_with("127.0.0.1:2"), "{master}");
    let mvapich = [
        ("MV2_COMM_WORLD_RANK", "1"),
        ("MV2_COMM_WORLD_SIZE", "2"),
        ("SLURM_JOB_ID", "9"),
        ("SLURM_JOB_NODELIST", "n[1-2]"),
    ];
    assert_eq!(found(&mvapich).0, Launcher::Mvapich);
    let pmix =
        [("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")];
    assert_eq!(found(&pmix).0, Launcher::Pmix);
}

#[test]
fn local_ranks_are_those_of_the_launcher() {
    for (variables, local_rank) in [
        (TORCHRUN, Some(1)),
        (SRUN, Some(1)),
        (OPEN_MPI, Some(2)),
        (PMI, Some(1)),
        (INDEXED_JOB, None),
    ] {
        assert_eq!(read(variables).unwrap().unwrap().local_rank, local_rank, "{variables:?}");
    }
}

#[test]
fn a_process_without_a_launcher_is_alone() {
    assert!(read(&[]).unwrap().is_none());
    assert!(read(&[("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")]).unwrap().is_none());
    assert!(read(SBATCH).unwrap().is_none());
    let interactive = [("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert!(read(&with(SBATCH, &interactive)).unwrap().is_none());
    assert!(read(&[("JOB_COMPLETION_INDEX", "3")]).unwrap().is_none());
}

#[test]
fn a_world_of_one_needs_no_meeting_point() {
    let one = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
    let launch = read(&one).unwrap().unwrap();
    assert_eq!(launch.world_size, 1);
    assert!(launch.tcp().unwrap().connect().is_ok());
}

#[test]
fn mpirun_in_a_step_of_slurm_gives_the_rank() {
    let daemon = with(OPEN_MPI, SRUN);
    assert_eq!(found(&daemon).0, Launcher::OpenMpi);
    let on_each_host = with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
    let several_hosts = with(SRUN, &on_each_host);
    let (launcher, _, _, master) = found(&several_hosts);
    assert_eq!(launcher, Launcher::OpenMpi);
    assert!(master.starts_with("login:2"), "{master}");
}

#[test]
fn torchrun_in_a_step_or_under_mpirun_gives_the_rank() {
    for outer in [SRUN, OPEN_MPI] {
        let (launcher, rank, world_size, master) = found(&with(outer, TORCHRUN));
        assert_eq!((launcher, rank, world_size), (Launcher::Torch, 3, 4));
        assert_eq!(master, "node0:29501");
    }
}

#[test]
fn exported_variables_must_agree_with_the_launcher() {
    let same = [("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
    assert_eq!(found(&with(SRUN, &same)), (Launcher::Torch, 5, 8, "h:1".into()));
    for (base, stray, other) in [
        (SRUN, ("RANK", "0"), "SLURM_PROCID"),
        (SRUN, ("WORLD_SIZE", "1"), "SLURM_STEP_NUM_TASKS"),
        (OPEN_MPI, ("RANK", "0"), "OMPI_COMM_WORLD_RANK"),
        (PMI, ("WORLD_SIZE", "2"), "PMI_SIZE"),
    ] {
        let error = read(&with(base, &[stray])).unwrap_err();
        let EnvError::Contradiction { variable, other: named, .. } = error else {
            panic!("{stray:?}: {error}");
        };
        assert_eq!((variable, named), (stray.0, other));
    }
}

#[test]
fn each_missing_variable_is_named() {
    for (base, name, named) in [
        (PYTORCH, "RANK", "RANK"),
        (PYTORCH, "WORLD_SIZE", "WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK"),
        (PMI, "PMI_SIZE", "PMI_SIZE"),
        (SRUN, "SLURM_PROCID", "SLURM_PROCID"),
    ] {
        let error = read(&without(base, name)).unwrap_err();
        let missing = matches!(error, EnvError::Missing { variable } if variable == named);
        assert!(missing, "without {name}: {error}");
    }
    let error = read(&[("DCP_RANK", "0")]).unwrap_err();
    assert!(matches!(error, EnvError::Missing { variable: "DCP_WORLD_SIZE" }), "{error}");
    let error = read(&[("PMIX_RANK", "0")]).unwrap_err();
    assert!(matches!(error, EnvError::Missing { variable: "WORLD_SIZE" }), "{error}");
    let ntasks = without(SRUN, "SLURM_STEP_NUM_TASKS");
    assert_eq!(found(&ntasks).2, 8);
}

#[test]
fn a_missing_meeting_point_names_the_variable() {
    for (base, name, named) in [
        (PYTORCH, "MASTER_ADDR", "MASTER_ADDR"),
        (PYTORCH, "MASTER_PORT", "MASTER_PORT"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "MASTER_ADDR"),
        (OPEN_MPI, "PMIX_NAMESPACE", "MASTER_PORT"),
        (PMI, "MASTER_PORT", "MASTER_PORT"),
        (PMI, "MPI_LOCALNRANKS", "MASTER_ADDR"),
        (INDEXED_JOB, "MASTER_ADDR", "MASTER_ADDR"),
    ] {
        let launch = read(&without(base, name)).unwrap().unwrap();
        let error = launch.tcp().unwrap_err();
        let variable = match &error {
            EnvError::Missing { variable } | EnvError::NoMeetingPoint { variable, .. } => variable,
            _ => panic!("without {name}: {error}"),
        };
        assert_eq!(*variable, named, "without {name}");
    }
}

#[test]
fn each_wrong_value_is_named() {
    for (base, name, value) in [
        (PYTORCH, "RANK", "4"),
        (PYTORCH, "RANK", "-1"),
        (PYTORCH, "RANK", "one"),
        (PYTORCH, "WORLD_SIZE", "0"),
        (PYTORCH, "WORLD_SIZE", "4294967296"),
        (PYTORCH, "MASTER_PORT", "0"),
        (PYTORCH, "MASTER_PORT", "65536"),
        (PYTORCH, "MASTER_ADDR", ""),
        (PYTORCH, "DCP_MASTER_PORT", "x"),
        (SRUN, "SLURM_PROCID", "8"),
        (SRUN, "SLURM_STEP_NODELIST", "gpu[003"),
        (SRUN, "SLURM_STEP_ID", "x"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "many"),
        (INDEXED_JOB, "JOB_COMPLETION_INDEX", "4"),
    ] {
        let error = read(&with(base, &[(name, value)]))
            .and_then(|launch| launch.unwrap().tcp())
            .unwrap_err();
        let named = matches!(error, EnvError::Invalid { variable, .. } if variable == name);
        assert!(named, "{name}={value}: {error}");
    }
}

#[test]
fn a_port_of_torchruns_own_is_left_alone() {
    let port = |more: Set<'_>| found(&with(TORCHRUN, more)).3;
    assert_eq!(port(&[("MASTER_PORT", "65535")]), "node0:65534");
    assert_eq!(port(&[("DCP_MASTER_PORT", "4000")]), "node0:4000");
    assert_eq!(port(&[("DCP_MASTER_ADDR", "node9")]), "node9:29501");
}

#[test]
fn derived_ports_differ_between_jobs_and_are_the_same_on_all_ranks() {
    let port = |more: Set<'_>| found(&with(SRUN, more)).3;
    assert_eq!(port(&[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")]), port(&[]));
    assert_ne!(port(&[("SLURM_STEP_ID", "3")]), port(&[]));
    assert_ne!(port(&[("SLURM_JOB_ID", "4712")]), port(&[]));
}

#[test]
fn a_port_that_nobody_chose_has_others_of_this_job_alone() {
    let meeting = |variables: Set<'_>| read(variables).unwrap().unwrap().meeting.unwrap();
    for (launcher, other_rank, other_job) in [
        (TORCHRUN, ("RANK", "0"), ("MASTER_PORT", "29502")),
        (TORCHRUN, ("LOCAL_RANK", "0"), ("TORCHELASTIC_RUN_ID", "run 2")),
        (SRUN, ("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "4712")),
    ] {
        let mine = meeting(launcher);
        let rank = meeting(&with(launcher, &[other_rank]));
        assert_eq!((&mine.other_ports, &mine.job), (&rank.other_ports, &rank.job));
        let job = meeting(&with(launcher, &[other_job]));
        assert_ne!(mine.other_ports, job.other_ports);
        assert_ne!(mine.job, job.job);
        let named =
            |job_id| meeting(&with(&with(launcher, &[other_job]), &[("DCP_JOB_ID", job_id)]));
        assert_ne!(meeting(&with(launcher, &[("DCP_JOB_ID", "x")])).job, named("x").job);
        assert!(mine.other_ports.iter().all(|port| (20000..30000).contains(port)), "{mine:?}");
        let chosen = meeting(&with(launcher, &[("DCP_MASTER_PORT", "4000")]));
        assert_eq!((chosen.port, chosen.other_ports), (4000, vec![]));
    }
    assert!(meeting(PYTORCH).other_ports.is_empty());
}

#[test]
fn the_first_host_of_a_list_is_found() {
    for (list, first) in [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-010,12],login1", "gpu003"),
        ("rack[1-2]node[07-08]", "rack1node07"),
        ("a[2,5].cluster", "a2.cluster"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(first));
    }
    for bad in ["", ",", "a[", "a[]", "a[x]", "a]b"] {
        assert_eq!(first_host(bad), None, "{bad}");
    }
}

proptest! {
    #[test]
    fn any_list_of_hosts_is_read_without_a_panic(list in "[a-c0-9\\[\\],-]{0,24}") {
        if let Some(host) = first_host(&list) {
            prop_assert!(!host.contains(['[', ',', ']']));
        }
    }
}

#[test]
fn a_process_that_is_alone_is_a_group_of_its_own() {
    assert_eq!(group_of(None).unwrap().world_size(), 1);
    let variables = |name: &str| match name {
        "RANK" => Some("0".to_owned()),
        "WORLD_SIZE" => Some("1".to_owned()),
        "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
        "MASTER_PORT" => Some("1".to_owned()),
        _ => None,
    };
    let launch = Launch::from_variables(variables).unwrap();
    assert_eq!(group_of(launch).unwrap().world_size(), 1);
}
