"""Chat formats: how a model writes reasoning and tool calls, and how its text becomes `OutputDelta` fields.

To add a family of models, add a file to `families/` (`docs/extending.md`). To change how

* a checkpoint's family is found, or what a family file may contain, open `family.py`;
* a request selects parser, grammar and template variables, open `chat_format.py`;
* text becomes reasoning and calls, open `reply_parser.py`;
* tools are checked, open `tool_checks.py`;
* calls become a grammar, open `tool_grammar.py`; for arguments that are not JSON, `argument_rules.py`.
"""
