"""The causal model types of transformers that Quintet lacks, by the reason. A type that gets an architecture leaves this
table."""

NOT_SUPPORTED = {
    "no architecture yet; its layers exist": """
        axk1 biogpt cohere2_moe cohere_compass_text ctrl dbrx flex_olmo gpt_neox_japanese hy_v3 iquestcoder kolibri1 mellum
        modernbert-decoder openai-gpt persimmon phi4_multimodal vaultgemma xglm youtu
        """,
    "attention sinks and another form of layers": "flint granite_swa granitemoe_swa mimo_v2_flash",
    "attention to tokens that an indexer chooses": """
        axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text
        """,
    "recurrent layers of another kind": """
        bailing_hybrid falcon_mamba jamba lfm3 mamba minimax olmo_hybrid recurrent_gemma rwkv xlstm zamba zamba2
        """,
    "layers of another kind": """
        aria_text beam blt cpmant diffllama doge hrm_text inkling2_text inkling_text jetmoe laguna longcat_flash qwen4_exp
        qwen4_exp_text zaya
        """,
    "layers that read images or sound": "mllama moshi",
    "a draft model of another model": "gemma4_assistant gemma4_unified_assistant",
    "not a plain text decoder": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra emu3
        ernie fuyu git marian mbart megatron-bert moss_transcribe_diarize musicgen musicgen_melody mvp pegasus plbart
        prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta
        xlm-roberta-xl xlnet xmod
        """,
}
OTHER_NAMES = {"gpt-sw3": "gpt2"}
"""The model_type in the files, by transformers' name."""
