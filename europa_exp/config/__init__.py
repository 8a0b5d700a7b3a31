"""What can be asked for: the schema, its checks, its identity and its written form. Nothing here imports torch."""


def register() -> None:
    """Give Hydra the schema under the name ``schema``, which ``conf/config.yaml`` takes as its ground."""
    from hydra.core.config_store import ConfigStore

    from europa_exp.config.schema import Config

    ConfigStore.instance().store(name="schema", node=Config)
