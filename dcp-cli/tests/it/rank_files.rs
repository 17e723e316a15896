//! Folders with a file for each rank, by the command.

use crate::support::{dcp, path};

const RUN: &str = "../trainers/verl_fsdp2_buffers_4r/ckpt";
const EXPECTED: &str = "../trainers/verl_fsdp2_buffers_4r/expected.safetensors";

#[test]
fn a_run_of_verl_is_read_at_the_step_of_its_tracker() {
    let listed = dcp(["ls", RUN, "--json"]).json();
    assert!(listed.to_string().contains("global_step_2"), "{listed}");
    for at in [RUN.to_owned(), format!("{RUN}/global_step_2"), format!("{RUN}/global_step_2/actor")]
    {
        dcp(["diff", &at, EXPECTED, "--exclude", "optimizer.param_groups.*"]).ok();
        dcp(["verify", "--deep", &at]).ok();
        dcp(["inspect", &at]).ok();
        dcp(["stats", &at]).ok();
    }
    dcp(["get", RUN, "model.layer_scalar"]).ok();
}

#[test]
fn a_role_is_written_as_a_model_with_its_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "hf");
    dcp(["convert", RUN, &target, "--to", "hf"]).ok();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
        assert!(std::path::Path::new(&target).join(name).exists(), "{name}");
    }
    let dcp_target = path(&folder, "dcp");
    dcp(["convert", RUN, &dcp_target, "--to", "dcp", "--everything"]).ok();
    dcp(["diff", RUN, &dcp_target]).ok();
    let resharded = path(&folder, "resharded");
    dcp(["reshard", RUN, &resharded, "--ranks", "2"]).ok();
    dcp(["diff", RUN, &resharded]).ok();
    let averaged = path(&folder, "averaged");
    dcp(["average", RUN, &dcp_target, "--out", &averaged, "--to", "dcp"]).ok();
}

#[test]
fn inspect_shows_the_files_of_ranks_and_what_is_put_together() {
    let folder = "../deepspeed/z3_fp16_w4_subgroups/ckpt";
    for (uri, file, tensor) in [
        (RUN, "model_world_size_4_rank_3.pt", "model.model.embed_tokens.weight"),
        (folder, "zero_pp_rank_3_mp", "model.emb.weight"),
    ] {
        let all = dcp(["inspect", uri]).stdout;
        assert!(all.contains(file) && all.contains("assembled"), "{all}");
        let one = dcp(["inspect", uri, "--shards", tensor]).stdout;
        assert!(one.contains("assembled"), "{one}");
        assert!(!all.contains("nowhere") && !one.contains("nowhere"), "{all}{one}");
    }
}
