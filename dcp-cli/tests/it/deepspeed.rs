//! Checkpoints of DeepSpeed, by the command.

use std::fs;
use std::path::Path;

use dcp_testing::{copy_folder, fixture};

use crate::support::{dcp, path};

const RUN: &str = "../deepspeed/z2_bf16_w2/ckpt";
const STEP: &str = "../deepspeed/z3_bf16_w2/ckpt/global_step2";

#[test]
fn a_run_of_deepspeed_is_listed_verified_and_converted() {
    let folder = tempfile::tempdir().unwrap();
    let listed = dcp(["ls", RUN, "--json"]).json();
    assert_eq!(listed["latest"], "global_step2");
    assert_eq!(
        (&listed["entries"][0]["kind"], &listed["entries"][0]["complete"]),
        (&"deepspeed".into(), &true.into())
    );
    dcp(["verify", "--deep", RUN]).ok();
    let facts = dcp(["inspect", RUN, "--json"]).json();
    assert_eq!(
        (&facts["deepspeed"]["stage"], &facts["deepspeed"]["data_parallel"]),
        (&2.into(), &2.into())
    );
    let (converted, resharded, single) =
        (path(&folder, "dcp"), path(&folder, "two"), path(&folder, "one.safetensors"));
    dcp(["convert", RUN, &converted, "--to", "dcp"]).ok();
    dcp(["diff", RUN, &converted]).ok();
    dcp(["reshard", RUN, &resharded, "--ranks", "3"]).ok();
    dcp(["diff", RUN, &resharded]).ok();
    let hf = path(&folder, "hf");
    dcp(["convert", RUN, &hf, "--to", "hf"]).ok();
    dcp(["convert", STEP, &single, "--to", "safetensors"]).ok();
    dcp(["stats", STEP]).ok();
    let got = dcp(["get", STEP, "model.fc1.weight"]);
    got.ok();
}

#[test]
fn a_folder_that_is_not_whole_is_complete_for_no_command() {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&fixture("deepspeed/z2_bf16_w2/ckpt"), folder.path());
    let step = folder.path().join("global_step2");
    let name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
    fs::remove_file(step.join(name)).unwrap();
    let (run, step) = (folder.path().to_str().unwrap(), step.to_str().unwrap());
    let listed = dcp(["ls", run, "--json"]).json();
    assert_eq!(listed["entries"][0]["complete"], false);
    let target = path(&folder, "target");
    for command in
        [vec!["inspect", step], vec!["verify", step], vec!["convert", step, &target, "--to", "dcp"]]
    {
        let ran = dcp(&command);
        assert!(
            ran.code != 0 && ran.stderr.contains("save of 2 ranks"),
            "{command:?}: {}",
            ran.stderr
        );
    }
    assert!(!Path::new(&target).exists());
}
