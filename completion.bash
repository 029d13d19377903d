# Completes the flags of these scripts, and their choices, in bash and zsh. In ~/.bashrc or ~/.zshrc:
#     source /path/to/exact-ddpm/completion.bash
# The flags are those that the script's --help lists; it is asked once for each script and shell.

[ -n "${ZSH_VERSION:-}" ] && autoload -U +X bashcompinit && bashcompinit

_exact_ddpm() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" script= help= name=
    for name in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
        case "${name##*/}" in
            prepare_data.py | train_unconditional.py | train_conditional.py | generate.py | evaluate.py | visualize.py | report.py | app.py | import_weights.py)
                script="$name" ;;
        esac
    done
    [ -n "$script" ] || return 0
    local kept="_exact_ddpm_help_$(basename "$script" .py)"
    help="${!kept:-}"
    if [ -z "$help" ]; then
        help="$("${COMP_WORDS[0]/#[!p]*/python}" "$script" --help 2>/dev/null)"
        printf -v "$kept" '%s' "$help"
    fi
    if [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$(grep -oE -- '--[a-z0-9_]+' <<< "$help" | sort -u)" -- "$word"))
    elif [[ "$before" == --* ]]; then # the choices of a flag that has some
        local choices="$(grep -oE -- "$before \{[^}]*\}" <<< "$help" | head -1 | sed 's/.*{//; s/}//; s/,/ /g')"
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    fi
}

complete -o default -F _exact_ddpm python python3 torchrun ./prepare_data.py ./train_unconditional.py \
    ./train_conditional.py ./generate.py ./evaluate.py ./visualize.py ./report.py ./app.py ./import_weights.py
